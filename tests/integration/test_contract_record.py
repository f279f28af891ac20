"""The run's contract in the record of its queues: a folder and a queue of different runs are told from each other."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

import pipeline
from eaglefeed.consumer.run import check_record, load_run_assets
from eaglefeed.errors import ContractMismatch, SchemaError
from eaglefeed.schema.contract import CONTRACT_FILE, CONTRACT_RECORD, RunContract
from eaglefeed.schema.refs import SampleRef
from eaglefeed.storage.base import StoredShard
from eaglefeed.storage.memory import MemoryStore

PROMPT = pipeline.prompt(0)


@pytest.fixture
def run() -> pipeline.Run:
    run = pipeline.Run()
    run.feed(PROMPT, close=False)
    return run


def produce_one(run: pipeline.Run, **options: object) -> None:
    run.prompts.close()
    run.produce(**options)


def test_the_first_producer_writes_the_same_contract_beside_the_shards_and_into_the_record(run: pipeline.Run) -> None:
    produce_one(run)
    assert run.samples.agreed()[CONTRACT_RECORD] == run.store.get_document(CONTRACT_FILE)
    check_record(run.samples, load_run_assets(run.store).contract)


def test_a_producer_with_another_folder_that_differs_is_refused_and_told_which_field(run: pipeline.Run) -> None:
    run.samples.agree(CONTRACT_RECORD, pipeline.contract(max_length=16, dtype="bfloat16").to_json())
    with pytest.raises(ContractMismatch, match=r"dtype=bfloat16.*dtype=float32"):
        produce_one(run)
    assert (run.target.calls, run.prompts.stats().ready, run.samples.stats().unsettled) == (0, 1, 0)


def test_a_producer_that_the_folders_contract_refuses_leaves_the_record_alone(run: pipeline.Run) -> None:
    run.store.put_document(CONTRACT_FILE, pipeline.contract(max_length=16).to_json())
    with pytest.raises(ContractMismatch, match="target_fingerprint"):
        produce_one(run, own=pipeline.contract(target_fingerprint="other"))
    assert CONTRACT_RECORD not in run.samples.agreed()


def test_a_trainer_with_another_runs_folder_is_refused_and_told_which_field(run: pipeline.Run) -> None:
    produce_one(run)
    other = pipeline.Run(store=MemoryStore("other"))
    other.feed(PROMPT)
    other.worker(own=pipeline.contract(target="another")).run(threading.Event())
    with pytest.raises(ContractMismatch, match=r"target=echo.*target=another"):
        check_record(run.samples, load_run_assets(other.store).contract)


def test_a_queue_that_lost_its_record_takes_the_folders_contract(run: pipeline.Run) -> None:
    produce_one(run)
    contract, lost = load_run_assets(run.store).contract, pipeline.Run()
    check_record(lost.samples, contract)
    assert RunContract.from_json(lost.samples.agreed()[CONTRACT_RECORD]) == contract


def test_a_record_that_is_no_contract_is_told(run: pipeline.Run) -> None:
    run.samples.agree(CONTRACT_RECORD, b"{}")
    with pytest.raises(SchemaError, match="not a run contract"):
        check_record(run.samples, pipeline.contract())


def test_a_producer_that_differs_is_refused_before_it_leases_also_where_nothing_is_left(run: pipeline.Run) -> None:
    produce_one(run)
    run.prompts.lease = None  # type: ignore[method-assign,assignment]
    with pytest.raises(ContractMismatch, match=r"producer w: .*wanted dtype=float32, got dtype=bfloat16"):
        run.produce(own=pipeline.contract(dtype="bfloat16"))
    with pytest.raises(ContractMismatch, match=r"tokenizer_fingerprint=t.*tokenizer_fingerprint=u"):
        run.produce(own=pipeline.contract(tokenizer_fingerprint="u"))


def test_shards_whose_contract_nobody_has_are_refused_and_left_alone(run: pipeline.Run) -> None:
    old = pipeline.Run(store=run.store)
    old.feed(pipeline.prompt(7))
    old.produce()
    run.store.delete_document(CONTRACT_FILE)
    run.prompts.close()
    with pytest.raises(ContractMismatch, match="shards without a contract"):
        run.produce()
    assert (run.target.calls, run.prompts.stats().ready, len(list(run.store.scan()))) == (0, 1, 1)
    assert not run.store.has_document(CONTRACT_FILE)
    old.produce()  # whose queue knows it


def test_shards_of_a_producer_that_agreed_meanwhile_are_no_strangers_while_its_file_is_not_seen(
    run: pipeline.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = pipeline.Run(store=run.store)
    other.feed(pipeline.prompt(7))
    other.produce()
    contract, scan = run.store.get_document(CONTRACT_FILE), run.store.scan
    assert contract is not None
    run.store.delete_document(CONTRACT_FILE)

    def scan_late() -> Iterator[StoredShard]:
        run.samples.agree(CONTRACT_RECORD, contract)
        return scan()

    monkeypatch.setattr(run.store, "scan", scan_late)
    run.prompts.close()
    assert run.produce().produced == 1


def test_a_contract_is_written_before_the_first_shard(run: pipeline.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    put, seen = run.store.put, []

    def looks(*args: Any) -> SampleRef:
        seen.append((run.store.has_document(CONTRACT_FILE), CONTRACT_RECORD in run.samples.agreed()))
        return put(*args)

    monkeypatch.setattr(run.store, "put", looks)
    produce_one(run)
    assert seen == [(True, True)]

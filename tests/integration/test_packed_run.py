"""Packed rows on their way: over a target server, through producer and stream, and by the commands."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

import pipeline
from coded_target import CodedTarget, check_answer, row
from commands import Shell, conversation, save_tiny_target, write_rows
from eaglefeed.consumer.backend_stream import BackendStream
from eaglefeed.consumer.run import load_run_assets
from eaglefeed.consumer.stream import SampleStream
from eaglefeed.errors import SchemaError, TargetMismatch
from eaglefeed.producer.asking import read_rows
from eaglefeed.producer.conversations import Conversation, packed_batches, to_packed_prompt
from eaglefeed.producer.server import TargetServer
from eaglefeed.producer.target import HFEagle3TargetModel
from eaglefeed.producer.worker import ProducerWorker
from eaglefeed.schema.batch import Eagle3TargetBatch
from eaglefeed.schema.collate import collate
from eaglefeed.schema.padding import pad_prompt
from eaglefeed.schema.prompt import Prompt
from eaglefeed.schema.vocab import VocabMapping
from eaglefeed.storage.shard import TensorWriter, encode_tensors
from remote_models import closing
from target_servers import serving
from tiny_target import LAYOUTS, tiny_model, tiny_sizes

NUM_CONVERSATIONS = 9
MAP = VocabMapping.from_ids(torch.arange(0, 64, 3), vocab_size=64)

torch.set_num_threads(1)


def prompts(batch_size: int = 2, number: int = 12) -> list[Prompt]:
    """Conversations of 1 to 9 tokens, with loss on some, in rows of at most 12."""
    draw = torch.Generator().manual_seed(0)

    def conversations() -> Iterator[Conversation]:
        for index in range(number):
            length = 1 + int(torch.randint(9, (), generator=draw))
            ids, loss = (torch.randint(0, top, (length,), generator=draw).tolist() for top in (64, 2))
            yield Conversation(f"c-{index}", index, tuple(ids), tuple(loss))

    said = {"tokenizer_fingerprint": "t", "template_fingerprint": "p", "max_length": 12}
    return [to_packed_prompt(rows, **said) for rows in packed_batches(conversations(), batch_size, 12)]


def same(got: Eagle3TargetBatch, wanted: Eagle3TargetBatch) -> None:
    one, other = got.tensors(), wanted.tensors()
    assert list(one) == list(other)
    for name, tensor in other.items():
        assert torch.equal(one[name], tensor), name


# over a target server


@pytest.fixture(scope="module")
def local() -> HFEagle3TargetModel:
    return HFEagle3TargetModel(tiny_model(LAYOUTS["llama"]()))


@pytest.fixture(scope="module")
def server(local: HFEagle3TargetModel) -> Iterator[TargetServer]:
    with serving(HFEagle3TargetModel(tiny_model(LAYOUTS["llama"]()))) as started:
        yield started


@pytest.mark.parametrize("plane", ["http", "gloo"])
@pytest.mark.parametrize("mapped", [False, True])
def test_a_remote_target_gives_packed_rows_the_same_numbers_bit_for_bit(
    plane: str, mapped: bool, local: HFEagle3TargetModel, server: TargetServer
) -> None:
    own = HFEagle3TargetModel(local.model)
    with closing(server.url, data_plane=plane) as model:
        if mapped:
            for target in (own, model):
                target.set_vocab_mapping(MAP.selected_token_ids, MAP.selected_token_mask)
        for each in prompts():
            same(model.generate_batch(**pad_prompt(each)), own.generate_batch(**pad_prompt(each)))


def test_packed_requests_share_no_forward_and_each_is_answered_with_its_own() -> None:
    target = CodedTarget()
    with serving(target, max_in_flight=8) as started, closing(started.url, in_flight=8, exact=False) as model:
        target.forwards.clear()
        target.gate.clear()
        packed = [model.generate_batch_async(**pad_prompt(each)) for each in prompts()]
        plain = [model.generate_batch_async(*row(first, 7, 9)) for first in range(12)]
        target.gate.set()
        for handle, each in zip(packed, prompts(), strict=True):
            same(handle.result(30), target.generate_batch(**pad_prompt(each)))
        for first, handle in enumerate(plain):
            check_answer(handle.result(30).tensors(), torch.tensor([[first, 7, 9]]))
    answered = [list(ids.shape) for ids in target.forwards]
    for each in prompts():
        assert list(pad_prompt(each)["input_ids"].shape) in answered


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("position_ids", torch.arange(12).expand(2, -1), "position_ids: does not count from 0 in each document"),
        ("seq_lens", torch.ones(1, 1), "packing of other rows"),
        ("doc_remaining", torch.zeros(2, 12), "doc_remaining: not the number of real tokens"),
        ("seq_lens", None, "packing takes all three"),
        ("position_ids", torch.full((2, 12), 0.5), "position_ids holds no whole numbers"),
    ],
)
def test_packing_that_does_not_add_up_is_refused_by_client_or_server(
    name: str, value: Any, message: str, server: TargetServer
) -> None:
    good = pad_prompt(prompts()[0])
    assert list(good["input_ids"].shape) == [2, 12]
    with closing(server.url) as model:
        with pytest.raises(SchemaError, match=message):
            model.generate_batch(**(good | {name: value}))
        model.generate_batch(**good)


@pytest.mark.parametrize("left_out", ["position_ids", "seq_lens", "doc_remaining", "loss_mask"])
def test_a_request_with_some_of_the_packing_is_refused(left_out: str) -> None:
    tensors = {name: tensor for name, tensor in pad_prompt(prompts()[0]).items() if name != left_out}
    with pytest.raises(SchemaError, match="other tensors than were asked for"):
        read_rows(encode_tensors(TensorWriter(tensors, {})), "request", max_tokens=99)


# through producer and stream


@pytest.mark.parametrize("compact", [False, True])
def test_what_is_streamed_is_what_the_target_makes_in_place_and_joins_with_the_rest(compact: bool) -> None:
    target = HFEagle3TargetModel(tiny_model(LAYOUTS["llama"]()), compact=compact)
    options: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32}
    if compact:
        options |= {"supervision": "last_hidden_states", "head_digest": target.head_digest(), "schema_version": 2}
        options |= {"supervision_rows": "supervised"}
    run = pipeline.Run(clock=pipeline.TurnableClock())
    run.feed(*prompts())
    worker = ProducerWorker(
        prompts=run.prompts,
        samples=run.samples,
        store=run.store,
        target=target,
        contract=pipeline.contract(**options),
        assets=target.target_assets,
        run_id="run",
        name="w",
        clock=run.clock,
    )
    stats = worker.run(threading.Event())
    assert (stats.produced, stats.dead) == (len(prompts()), 0)
    assets = load_run_assets(run.store)
    head = assets.head()
    said = {"contract": assets.contract, "head": head, "clock": run.clock}
    with SampleStream(run.samples, run.store, consumer="t", **said) as stream:
        batches = stream.take(len(prompts()))
    assert [batch.sample_ids for batch in batches] == [(each.sample_id,) for each in prompts()]
    for batch, each in zip(batches, prompts(), strict=True):
        made = target.generate_batch(**pad_prompt(each))
        same(batch, Eagle3TargetBatch(**head.expand(made.tensors())) if head else made)
    joined, longest = collate(batches), max(batch.input_ids.shape[1] for batch in batches)
    assert len(joined.input_ids) == sum(len(each.rows) for each in prompts())
    assert set(joined.tensors()["seq_lens"].sum(-1).tolist()) == {longest}


def test_a_target_in_place_answers_packed_prompts_as_they_come() -> None:
    target = HFEagle3TargetModel(tiny_model(LAYOUTS["llama"]()))
    with BackendStream(target, prompts(), vocab_size=64) as stream:
        batches = stream.take(len(prompts()))
    assert stream.stats.dead == 0
    for batch, each in zip(batches, prompts(), strict=True):
        same(batch, target.generate_batch(**pad_prompt(each)))


# by the commands


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", [conversation(index) for index in range(NUM_CONVERSATIONS)])
    small = ["feed.max_length=200", "draft.vocab_size=259", "train.start_timeout_s=20"]
    return Shell(capsys, f"target.name={folder}", "target.dtype=float32", *small)


def weights(output: str) -> dict[str, torch.Tensor]:
    return load_file(max(Path(output).glob("step-*.safetensors")))


def test_packed_feeding_by_the_commands_trains_the_same_on_the_stream_and_in_place(shell: Shell) -> None:
    plain = shell.run("feed", "rows.jsonl", "--run", "plain", "--json").document
    assert plain["items"] == NUM_CONVERSATIONS
    fed = shell.run("feed", "rows.jsonl", "--packing", "--run", "packed", "--json").document
    assert (fed["accepted"], fed["tokens"]) == (NUM_CONVERSATIONS, plain["tokens"])
    # Rows of 200 tokens hold several conversations of about 70 each.
    assert fed["items"] == -(-NUM_CONVERSATIONS // (200 * NUM_CONVERSATIONS // plain["tokens"]))
    again = shell.run("feed", "rows.jsonl", "--packing", "--run", "packed", "--json")
    assert (again.document["queued"], again.document["known"]) == (0, fed["items"]), again.err
    produced = shell.run("produce", "--run", "packed", "--json").document
    assert (produced["produced"], produced["dead"]) == (fed["items"], 0)
    assert fed["num_bytes"] < produced["num_bytes"] < fed["num_bytes"] + fed["items"] * 4096
    for words in (["-o", "streamed"], ["rows.jsonl", "--target-backend", "colocated", "-o", "colocated"]):
        trained = shell.run("train", *words, "feed.packing=true", "--run", "packed", "--json")
        assert trained.code == 0, trained.err
        assert trained.document["acked"] == fed["items"]
    one, other = weights("streamed"), weights("colocated")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


# targets that cannot be packed


@pytest.fixture
def leaking() -> HFEagle3TargetModel:
    layers = ["conv", "full_attention"] * 3 + ["conv"]
    return HFEagle3TargetModel(tiny_model(hf.Lfm2Config(**tiny_sizes(), layer_types=layers)))


LEAKS = "Lfm2ForCausalLM: the target lets packed documents see each other; feed without packing"


def test_a_producer_whose_target_cannot_be_packed_ends_and_gives_the_prompts_back(leaking: HFEagle3TargetModel) -> None:
    run = pipeline.Run(clock=pipeline.TurnableClock())
    run.target = leaking
    run.feed(*prompts())
    with pytest.raises(TargetMismatch, match=LEAKS):
        run.produce(own=pipeline.contract(vocab_size=64, hidden_size=32))
    found = run.prompts.stats()
    assert (found.ready, found.dead, run.samples.stats().unsettled) == (len(prompts()), 0, 0)


def test_a_server_and_a_training_in_place_refuse_it_too_and_plain_rows_pass(leaking: HFEagle3TargetModel) -> None:
    with serving(leaking) as started, closing(started.url) as model:
        with pytest.raises(TargetMismatch, match=LEAKS):
            model.generate_batch(**pad_prompt(prompts()[0]))
        assert model.generate_batch(*row(5, 7, 9)).input_ids.tolist() == [[7, 9, 0]]
    with BackendStream(leaking, prompts(), vocab_size=64) as stream, pytest.raises(TargetMismatch, match=LEAKS):
        stream.take(1)

"""What a producer does with a prompt, whatever happens to it."""

import threading
from dataclasses import replace

import pytest
import torch

import pipeline
from eaglefeed.errors import ContractMismatch, StoreFull
from eaglefeed.queue.base import Lease, QueueItem
from eaglefeed.schema.contract import ASSETS_FILE, CONTRACT_FILE, RunContract
from eaglefeed.schema.prompt import PromptRow
from eaglefeed.schema.refs import decode_ref
from eaglefeed.storage.memory import MemoryStore

THREE = tuple(pipeline.prompt(index) for index in range(3))


def test_every_prompt_becomes_one_sample_with_its_own_tensors() -> None:
    run = pipeline.Run()
    run.feed(*THREE)
    stats = run.produce()
    assert stats.produced == 3
    refs = {item.id: decode_ref(item.payload) for item in run.samples.payloads()}
    assert set(refs) == {"p-0", "p-1", "p-2"}
    for index in range(3):
        tensors = run.store.get(refs[f"p-{index}"])
        assert tensors["aux_hidden_states"][0, :, 0].tolist() == [1.0 + index, 2.0, 3.0]
        assert tensors["loss_mask"].tolist() == [[1, 1, 0]]


def test_the_last_producer_closes_the_samples() -> None:
    run = pipeline.Run()
    run.feed(*THREE)
    assert not run.samples.stats().closed
    run.produce()
    assert run.samples.stats().closed
    assert run.prompts.stats().drained


def test_the_first_producer_writes_contract_and_assets_and_the_next_one_agrees() -> None:
    run = pipeline.Run()
    run.feed(THREE[0], close=False)
    stop = threading.Event()
    run.target.before = lambda _ids: stop.set()
    run.worker().run(stop)
    written = run.store.get_document(CONTRACT_FILE)
    assert written is not None
    assert RunContract.from_json(written) == pipeline.contract(max_length=16)
    assert run.store.has_document(ASSETS_FILE)
    run.target.before = lambda _ids: None
    run.feed(*THREE[1:])
    assert run.produce(name="second").produced == 2


@pytest.mark.parametrize("field", ["target_fingerprint", "dtype", "aux_layer_ids", "supervision"])
def test_a_producer_that_differs_is_refused_and_gives_its_prompts_back(field: str) -> None:
    run = pipeline.Run()
    run.store.put_document(CONTRACT_FILE, pipeline.contract(max_length=16).to_json())
    run.feed(*THREE)
    other = {"aux_layer_ids": (4, 5, 6), "supervision": "target_probs"}.get(field, "other")
    with pytest.raises(ContractMismatch, match=field):
        run.produce(own=pipeline.contract(**{field: other}))
    assert run.target.calls == 0
    assert run.samples.stats().unsettled == 0
    assert (run.prompts.stats().ready, run.prompts.stats().leased, run.prompts.stats().dead) == (3, 0, 0)


def test_prompts_of_another_tokenizer_are_refused_before_a_forward() -> None:
    run = pipeline.Run()
    run.feed(pipeline.prompt(0, tokenizer_fingerprint="other"))
    with pytest.raises(ContractMismatch, match="tokenizer_fingerprint"):
        run.produce()
    assert run.target.calls == 0
    assert run.store.get_document(CONTRACT_FILE) is None


def test_a_later_prompt_of_another_kind_is_a_dead_letter_and_the_run_goes_on() -> None:
    run = pipeline.Run()
    run.feed(THREE[0], pipeline.prompt(1, template_fingerprint="other"), THREE[2])
    stats = run.produce()
    assert (stats.produced, stats.dead) == (2, 1)
    assert [letter.id for letter in run.prompts.dead_letters()] == ["p-1"]


def test_garbage_in_the_queue_is_a_dead_letter_with_its_reason() -> None:
    run = pipeline.Run()
    run.prompts.put([QueueItem("junk", b"\xc1\xc1")])
    run.feed(*THREE)
    assert run.produce().dead == 1
    (letter,) = run.prompts.dead_letters()
    assert "SchemaError: not a prompt" in letter.reason


def test_token_ids_beyond_the_vocabulary_never_reach_the_target() -> None:
    run = pipeline.Run()
    run.feed(pipeline.prompt(0, rows=(PromptRow((1, pipeline.VOCAB), (0, 1)),)))
    assert run.produce().dead == 1
    assert run.target.calls == 0


def test_states_that_are_not_finite_are_never_published() -> None:
    run = pipeline.Run()
    run.feed(*THREE)
    plain = run.target.generate_batch

    def with_nan(**rows: torch.Tensor) -> object:
        batch = plain(**rows)
        if rows["input_ids"][0, 0] == 2:
            batch.aux_hidden_states[0, 1, 3] = float("nan")
        return batch

    run.target.generate_batch = with_nan  # type: ignore[method-assign,assignment]
    stats = run.produce()
    assert (stats.produced, stats.dead) == (2, 1)
    (letter,) = run.prompts.dead_letters()
    assert letter.id == "p-1"
    assert "aux_hidden_states" in letter.reason
    assert len(list(run.store.scan())) == 2


def test_a_target_that_fails_once_is_tried_again() -> None:
    run = pipeline.Run()
    run.feed(*THREE)
    seen: list[int] = []

    def fail_first(ids: torch.Tensor) -> None:
        seen.append(int(ids[0, 0]))
        if len(seen) == 1:
            raise RuntimeError("out of memory")
        run.clock.advance(20)

    run.target.before = fail_first
    stats = run.produce()
    assert (stats.produced, stats.retried, stats.dead) == (3, 1, 0)
    assert sorted(seen) == [1, 1, 2, 3]


def test_a_target_that_always_fails_on_a_prompt_ends_in_a_dead_letter() -> None:
    run = pipeline.Run()
    run.feed(*THREE)

    def fail(ids: torch.Tensor) -> None:
        run.clock.advance(20)
        if ids[0, 0] == 2:
            raise RuntimeError("kernel died")

    run.target.before = fail
    stats = run.produce()
    assert (stats.produced, stats.dead) == (2, 1)
    (letter,) = run.prompts.dead_letters()
    assert letter.delivery_count == 5
    assert "kernel died" in letter.reason


def test_a_stop_finishes_the_item_in_hand_and_gives_back_the_rest() -> None:
    run = pipeline.Run()
    run.feed(*THREE)
    stop = threading.Event()
    run.target.before = lambda _ids: stop.set()
    stats = run.worker().run(stop)
    assert (stats.produced, stats.returned) == (1, 2)
    assert (run.prompts.stats().ready, run.prompts.stats().leased) == (2, 0)
    lease = run.prompts.lease(9, visibility_timeout_s=60, consumer="next")
    assert isinstance(lease, Lease)
    assert [(item.id, item.delivery_count) for item in lease.items] == [("p-1", 1), ("p-2", 1)]
    assert run.prompts.stats().workers == {}


def test_a_lost_lease_publishes_nothing_and_leaves_no_shard() -> None:
    run = pipeline.Run()
    run.feed(THREE[0])
    stolen: list[Lease] = []

    def lose(_ids: torch.Tensor) -> None:
        if not stolen:
            run.clock.advance(61)
            lease = run.prompts.lease(1, visibility_timeout_s=1000, consumer="thief")
            assert isinstance(lease, Lease)
            stolen.append(lease)

    run.target.before = lose
    stop = threading.Event()
    worker = run.worker()
    thread = threading.Thread(target=worker.run, args=(stop,))
    thread.start()
    while not worker.stats.stale and thread.is_alive():
        pass
    stop.set()
    thread.join(20)
    assert worker.stats.stale == 1
    assert worker.stats.produced == 0
    assert list(run.store.scan()) == []
    assert run.prompts.ack(stolen[0].token, ["p-0"]).ok == ("p-0",)


def test_a_sample_that_is_there_with_other_content_is_not_replaced() -> None:
    run = pipeline.Run()
    run.samples.put([QueueItem("p-1", b"made by somebody else")])
    run.feed(*THREE)
    stats = run.produce()
    assert (stats.produced, stats.dead) == (2, 1)
    (letter,) = run.prompts.dead_letters()
    assert "IdConflict" in letter.reason
    assert len(list(run.store.scan())) == 2


def test_a_full_store_gives_the_prompts_back_and_goes_on_when_there_is_room() -> None:
    class Filling(MemoryStore):
        refusals = 2

        def put(self, ref, tensors):  # type: ignore[no-untyped-def]
            if self.refusals:
                self.refusals -= 1
                raise StoreFull(self.uri, num_bytes=9, free_bytes=0, reason="quota")
            return super().put(ref, tensors)

    run = pipeline.Run(store=Filling())
    run.feed(*THREE)
    stats = run.produce()
    assert (stats.produced, stats.dead) == (3, 0)
    assert stats.paused_s >= 2
    assert run.prompts.stats().redelivered == 0


def test_producers_wait_while_there_is_no_room() -> None:
    from eaglefeed.queue.base import QueueLimits

    run = pipeline.Run()
    run.samples.configure(QueueLimits(high_count=2, low_count=1))
    run.feed(*(pipeline.prompt(index) for index in range(12)))
    stop = threading.Event()
    worker = run.worker()
    thread = threading.Thread(target=worker.run, args=(stop,))
    thread.start()
    try:
        while not worker.stats.paused_s and thread.is_alive():
            run.clock.advance(0.01)
        assert run.samples.stats().ready == 2  # none beyond the mark
        lease = run.samples.lease(4, visibility_timeout_s=1e6, consumer="t")
        assert isinstance(lease, Lease)
        run.samples.ack(lease.token, [item.id for item in lease.items])
        while worker.stats.produced < 4 and thread.is_alive():
            run.clock.advance(0.01)
        assert worker.stats.produced == 4
    finally:
        stop.set()
        thread.join(20)
    assert not thread.is_alive()


def test_several_producers_share_a_run_without_loss_or_repeat() -> None:
    run = pipeline.Run()
    run.feed(*(pipeline.prompt(index) for index in range(40)))
    workers = [run.worker(name=f"w{index}") for index in range(3)]
    threads = [threading.Thread(target=worker.run, args=(threading.Event(),)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sum(worker.stats.produced for worker in workers) == 40
    assert run.samples.stats().ready == 40
    assert len(list(run.store.scan())) == 40


def test_padded_rows_keep_their_masks() -> None:
    from eaglefeed.schema.padding import pad_prompt

    both = replace(pipeline.prompt(0), rows=(PromptRow((4, 5, 6), (0, 1, 1)), PromptRow((7,), (1,))))
    ids, attention, loss = pad_prompt(both).values()
    assert ids.tolist() == [[4, 5, 6], [7, 0, 0]]
    assert attention.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert loss.tolist() == [[0, 1, 1], [1, 0, 0]]

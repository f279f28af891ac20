"""A sample that is not what its prompt asked for, or not fit to be trained on, is set aside; its neighbours go on."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

import pipeline
from coded_target import CodedTarget, H, V
from eaglefeed.consumer.backend_stream import BackendStream
from eaglefeed.consumer.stream import SampleStream
from eaglefeed.errors import ContractMismatch
from eaglefeed.producer.rows import Rows
from eaglefeed.producer.target import HFEagle3TargetModel
from eaglefeed.producer.worker import ProducerWorker
from eaglefeed.schema.batch import Eagle3TargetBatch
from eaglefeed.schema.prompt import Prompt, PromptRow
from tiny_target import LAYOUTS, tiny_model

torch.set_num_threads(1)
NAN, INF = float("nan"), float("inf")
THREE = tuple(pipeline.prompt(index) for index in range(3))
Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def value(name: str, place: tuple[int, ...], number: float) -> Change:
    """One number of a feature is another."""

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors[name][place] = number
        return tensors

    return change


def feature(name: str, made: Callable[[Tensor], Tensor]) -> Change:
    """A whole feature is another."""
    return lambda tensors: tensors | {name: made(tensors[name])}


def longer(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """All features have a row more: the token that the engine sampled."""
    return {name: pad(tensor, (0, 0, 0, 1) if tensor.ndim == 3 else (0, 1)) for name, tensor in tensors.items()}


class Spoiling(pipeline.EchoTarget):
    """Answers the prompt whose first token is 2, which is p-1, with something else."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change

    def generate_batch(self, input_ids: Tensor, *rest: Tensor, **rows: Tensor) -> Eagle3TargetBatch:
        batch = super().generate_batch(input_ids, *rest, **rows)
        return Eagle3TargetBatch(**self.change(batch.tensors())) if input_ids[0, 0] == 2 else batch


def streamed(run: pipeline.Run) -> list[str]:
    """What a trainer gets of a run."""
    own = pipeline.contract(max_length=16)
    with SampleStream(run.samples, run.store, consumer="t", contract=own, clock=run.clock) as stream:
        return [batch.sample_ids[0] for batch in stream]


REFUSED: dict[str, tuple[Change, str]] = {
    # 8 states and 7 tokens, or none, or others: here 3 states, of 3 tokens.
    "a state too few": (
        feature("aux_hidden_states", lambda aux: aux[:, :2]),
        "SchemaError: p-1: input_ids disagrees on axis S with aux_hidden_states, wanted 2, got 3",
    ),
    "a state too many": (
        feature("aux_hidden_states", lambda aux: pad(aux, (0, 0, 0, 1))),
        "SchemaError: p-1: input_ids disagrees on axis S with aux_hidden_states, wanted 4, got 3",
    ),
    "no ids": (
        feature("input_ids", lambda ids: ids[:, :0]),
        "SchemaError: p-1: input_ids disagrees on axis S with aux_hidden_states, wanted 3, got 0",
    ),
    "another last id": (
        value("input_ids", (0, 1), 9),
        "SampleCorrupt: p-1: input_ids: not of the rows that were asked for, got 1 such, the first at [0, 1]: 9",
    ),
    "a row more of everything": (
        longer,
        "SampleCorrupt: p-1: input_ids is not of the rows that were asked for, wanted [1, 3], got [1, 4]",
    ),
    "loss elsewhere": (value("loss_mask", (0, 0), 0), "p-1: loss_mask: not of the rows that were asked for"),
    "half of it real": (value("attention_mask", (0, 2), 0), "p-1: attention_mask: not of the rows that were asked for"),
    "ids not shifted": (
        feature("input_ids", lambda ids: torch.tensor([[2, 2, 3]])),
        "p-1: input_ids: not of the rows that were asked for, got 2 such, the first at [0, 1]: 2",
    ),
    "NaN": (
        value("aux_hidden_states", (0, 1, 5), NAN),
        "aux_hidden_states: not finite, got 1 such, the first at [0, 1, 5]",
    ),
    "infinite": (value("aux_hidden_states", (0, 2, 0), -INF), "aux_hidden_states: not finite, got 1 such"),
    "NaN in padding": (
        value("logits", (0, 2, 4), NAN),
        "logits: no finite largest value in the row, got 1 such, the first at [0, 2]: nan",
    ),
    "every token banned": (
        value("logits", (0, 1), -INF),
        "logits: no finite largest value in the row, got 1 such, the first at [0, 1]: -inf",
    ),
    "ids of 32 bits": (feature("input_ids", Tensor.int), "input_ids has the wrong dtype, wanted ('int64',), got int32"),
    "mask of bool": (feature("loss_mask", Tensor.bool), "loss_mask has the wrong dtype, wanted ('int64',), got bool"),
    "mask of float": (
        feature("loss_mask", Tensor.float),
        "loss_mask has the wrong dtype, wanted ('int64',), got float32",
    ),
    "mask of bytes": (feature("attention_mask", Tensor.char), "attention_mask has the wrong dtype"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_it_is_a_dead_letter_with_its_reason_and_the_neighbours_are_trained_on(fault: str) -> None:
    change, reason = REFUSED[fault]
    run = pipeline.Run(clock=pipeline.TurnableClock(), target=Spoiling(change))
    run.feed(*THREE)
    stats = run.produce()
    assert (stats.produced, stats.dead) == (2, 1)
    (letter,) = run.prompts.dead_letters()
    assert letter.id == "p-1"
    assert reason in letter.reason
    assert (run.samples.stats().ready, len(list(run.store.scan()))) == (2, 2)
    assert streamed(run) == ["p-0", "p-2"]


@pytest.mark.parametrize("fault", REFUSED)
def test_a_training_without_a_queue_refuses_the_same(fault: str) -> None:
    seen = []
    with BackendStream(Spoiling(REFUSED[fault][0]), THREE, vocab_size=pipeline.VOCAB) as stream:
        while not stream.ended:
            seen += [batch.sample_ids[0] for batch in stream.take(1)]
            stream.ack()
    assert seen == ["p-0", "p-2"]
    assert stream.stats.dead == 1


def test_a_lone_prompt_that_is_refused_leaves_no_ref_and_no_shard() -> None:
    for fault in ("a state too few", "no ids", "another last id", "a row more of everything"):
        run = pipeline.Run(target=Spoiling(REFUSED[fault][0]))
        run.feed(THREE[1])
        assert run.produce().dead == 1
        assert (run.samples.stats().unsettled, list(run.store.scan())) == (0, [])


def test_a_token_that_the_target_bans_everywhere_is_no_fault() -> None:
    run = pipeline.Run(clock=pipeline.TurnableClock(), target=Spoiling(value("logits", (0, slice(2), 7), -INF)))
    run.feed(*THREE)
    assert (run.produce().produced, run.prompts.stats().dead) == (3, 0)
    assert streamed(run) == ["p-0", "p-1", "p-2"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            feature("aux_hidden_states", Tensor.half),
            "differs from the run's contract, wanted dtype=float32, got dtype=float16",
        ),
        (
            feature("aux_hidden_states", lambda aux: aux.repeat(1, 1, 2)),
            r"aux_hidden_states of another width than .*, wanted 12 \(3 layers of hidden_size 4\), got 24",
        ),
        (
            feature("logits", lambda logits: pad(logits, (0, 5))),
            r"logits of another width than .*, wanted 50 \(vocab_size\), got 55",
        ),
    ],
)
def test_a_target_that_is_not_what_the_contract_says_ends_its_producer(change: Change, told: str) -> None:
    run = pipeline.Run(target=Spoiling(change))
    run.feed(THREE[1])
    with pytest.raises(ContractMismatch, match=f"p-1: {told}"):
        run.produce()
    assert (run.prompts.stats().ready, run.samples.stats().unsettled, list(run.store.scan())) == (1, 0, [])


def test_a_producer_of_probabilities_whose_target_has_no_map_publishes_nothing() -> None:
    run = pipeline.Run()
    run.feed(*THREE)
    with pytest.raises(ContractMismatch, match="wanted supervision=target_probs, got supervision=logits"):
        run.produce(own=pipeline.contract(supervision="target_probs"))
    assert (run.prompts.stats().ready, list(run.store.scan())) == (3, [])


class Holed(CodedTarget):
    """Its states are NaN beyond a row's real length, and at `holes`."""

    def __init__(self, *, compact: bool) -> None:
        super().__init__()
        self._compact = compact
        self.holes: set[int] = set()
        self.bad_logit: int | None = None

    def _forward(self, rows: Rows, position_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        aux, last = super()._forward(rows, position_ids)
        beyond = ~rows.real | torch.isin(rows.input_ids, torch.tensor([*self.holes], dtype=torch.int64))
        return aux.masked_fill(beyond[..., None], NAN), last.masked_fill(beyond[..., None], NAN)

    def _logits(self, last: Tensor) -> Tensor:
        logits = super()._logits(last)
        if self.bad_logit is not None:
            logits[..., self.bad_logit] = NAN
        return logits


def holed(supervision: str) -> Holed:
    target = Holed(compact=supervision == "last_hidden_states")
    if supervision == "target_probs":
        target.set_vocab_mapping(torch.arange(8), torch.arange(V) < 8)
    return target


def made(target: Any, supervision: str, *prompts: Prompt, **changes: object) -> tuple[int, list[str]]:
    """How many samples of a run's prompts are published, and why the others are not."""
    compact = {"head_digest": "h", "schema_version": 2} if supervision == "last_hidden_states" else {}
    fields = {"supervision": supervision, "vocab_size": V, "hidden_size": H} | compact | changes
    run = pipeline.Run()
    run.feed(*prompts)
    worker = ProducerWorker(
        prompts=run.prompts,
        samples=run.samples,
        store=run.store,
        target=target,
        contract=pipeline.contract(**fields),
        assets=target.target_assets,
        run_id="run",
        name="w",
        clock=run.clock,
    )
    return worker.run(threading.Event()).produced, [letter.reason for letter in run.prompts.dead_letters()]


def prompt(sample_id: str, *rows: tuple[int, ...]) -> Prompt:
    return pipeline.prompt(0, sample_id=sample_id, rows=tuple(PromptRow(row, (1,) * len(row)) for row in rows))


SUPERVISION = ("logits", "target_probs", "last_hidden_states")


@pytest.mark.parametrize("supervision", SUPERVISION)
def test_what_an_engine_leaves_in_the_padding_is_zeroed_and_no_fault(supervision: str) -> None:
    assert made(holed(supervision), supervision, prompt("a", (1, 2, 3), (4,)), prompt("b", (5,), (6, 7))) == (2, [])


@pytest.mark.parametrize("supervision", SUPERVISION)
def test_a_state_that_is_not_finite_at_a_real_token_sets_the_sample_aside(supervision: str) -> None:
    target = holed(supervision)
    target.holes = {9}
    produced, reasons = made(target, supervision, prompt("a", (1, 2)), prompt("b", (1, 2, 9)), prompt("c", (3, 4)))
    assert produced == 2
    assert [reason.startswith("SampleCorrupt: b: aux_hidden_states: not finite") for reason in reasons] == [True]
    assert f"got {3 * H} such, the first at [0, 2, 0]: nan" in reasons[0]


@pytest.mark.parametrize("supervision", SUPERVISION)
def test_a_logit_that_is_not_finite_is_found_also_where_it_is_not_stored(supervision: str) -> None:
    target = holed(supervision)
    target.bad_logit = 60  # not in the draft vocabulary, and no part of the last hidden states
    produced, reasons = made(target, supervision, prompt("a", (1, 2, 3)))
    assert produced == 0
    assert f"SampleCorrupt: a: {supervision}: no" in reasons[0]
    assert "the first at [0, 0" in reasons[0]


def test_activations_beyond_float16_are_found() -> None:
    model = tiny_model(LAYOUTS["llama"]())
    model.model.embed_tokens.weight.data.mul_(4e5)  # at most some 3e5 in bfloat16, infinite in float16
    for dtype, produced in (("bfloat16", 1), ("float16", 0)):
        target = HFEagle3TargetModel(model.to(getattr(torch, dtype)))
        got, reasons = made(target, "logits", prompt("a", (1, 2, 3)), dtype=dtype, hidden_size=32, vocab_size=64)
        assert got == produced
        assert [reason.partition(", got")[0] for reason in reasons] == (
            [] if produced else ["SampleCorrupt: a: aux_hidden_states: not finite"]
        )

"""Colocated parity: one trainer on a target in this process and on its stream ends with the same weights, bit for bit.

A queue, a store and a producer stand between the two, and nothing of them may show in the training.
"""

import json
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import pipeline
import samples
from eaglefeed.consumer.draft import Eagle3Draft
from eaglefeed.consumer.draft_config import DraftConfig
from eaglefeed.consumer.ranks import Ranks
from eaglefeed.consumer.rounds import RoundStream
from eaglefeed.consumer.run import RunAssets, TrainingRun, load_run_assets
from eaglefeed.consumer.stream import SampleStream
from eaglefeed.consumer.trainer import DraftTrainer
from eaglefeed.producer.replay import replay
from eaglefeed.producer.target import HFEagle3TargetModel
from eaglefeed.producer.worker import ProducerWorker
from eaglefeed.queue.base import LeaseQueue
from eaglefeed.queue.memory import MemoryLeaseQueue
from eaglefeed.schema.batch import Eagle3TargetBatch
from eaglefeed.schema.collate import collate
from eaglefeed.schema.contract import RunContract
from eaglefeed.schema.eagle3_compact import decode_compact, encode_compact
from eaglefeed.schema.padding import pad_prompt
from eaglefeed.schema.prompt import Prompt, PromptRow
from eaglefeed.storage.shared_dir import SharedDirStore
from tiny_target import LAYOUTS, tiny_model

torch.set_num_threads(1)
V = 64
T2D = torch.arange(V) % 3 != 0
NUM, PER_STEP = 6, 2
STEPS = NUM // PER_STEP


class Encoding(NamedTuple):
    """How a run's supervision is stored."""

    supervision: str
    aux_storage: str = "same"
    supervision_rows: str = "all"
    dtype: str = "float32"

    @property
    def is_compact(self) -> bool:
        return self.supervision == "last_hidden_states"


LOGITS, PROBS, COMPACT = (Encoding(name) for name in ("logits", "target_probs", "last_hidden_states"))
SUPERVISED = COMPACT._replace(supervision_rows="supervised")
FP8 = COMPACT._replace(aux_storage="fp8")
ENCODINGS = [LOGITS, PROBS, COMPACT, SUPERVISED, FP8, FP8._replace(supervision_rows="supervised")]
ENCODINGS += [each._replace(dtype="bfloat16") for each in (LOGITS, PROBS, SUPERVISED)]


def prompts(*, packed: bool = False) -> tuple[Prompt, ...]:
    """One and two rows in turn, of mixed lengths; packed ones hold two or three documents."""
    draw = torch.Generator().manual_seed(0)

    def row(length: int) -> PromptRow:
        ids, mask = (torch.randint(0, top, (length,), generator=draw).tolist() for top in (V, 2))
        documents = (4, length - 6, 2) if length % 2 else (5, length - 5)
        return PromptRow(tuple(ids), tuple(mask), documents if packed else ())

    rows = [[row(10 + index), row(15 - index)][: 1 + index % 2] for index in range(NUM)]
    common = {"tokenizer_fingerprint": "t", "template_fingerprint": "p", "max_length": 32}
    return tuple(Prompt(sample_id=f"p-{index}", rows=tuple(each), **common) for index, each in enumerate(rows))


def target(encoding: Encoding) -> HFEagle3TargetModel:
    model = tiny_model(LAYOUTS["llama"]()).to(getattr(torch, encoding.dtype))
    opened = HFEagle3TargetModel(model, compact=encoding.is_compact)
    if encoding.supervision == "target_probs":
        opened.set_vocab_mapping(T2D.nonzero().flatten(), T2D)
    return opened


def contract(encoding: Encoding, model: HFEagle3TargetModel) -> RunContract:
    fields: dict[str, object] = encoding._asdict() | {"vocab_size": V, "hidden_size": 32}
    if encoding.is_compact:
        fields |= {"head_digest": model.head_digest(), "schema_version": 2}
    return pipeline.contract(**fields)


class Learned(NamedTuple):
    """A training's losses, accuracies and gradient norms by step, and its weights and moments."""

    history: list[tuple[Any, ...]]
    tensors: dict[str, Tensor]


def assert_same(one: Learned, other: Learned) -> None:
    assert one.history == other.history
    assert list(one.tensors) == list(other.tensors)
    for name, tensor in one.tensors.items():
        assert torch.equal(tensor, other.tensors[name]), name


def trainer(assets: RunAssets) -> DraftTrainer:
    draft = Eagle3Draft(DraftConfig.from_target_config(assets.config, draft_vocab_size=int(T2D.sum())))
    names = {"embed_tokens": "embed_tokens.weight", "lm_head": "lm_head.weight", "norm": "norm.weight"}
    draft.initialize_from_target(**{name: assets.tensors[key] for name, key in names.items()}, t2d=T2D)
    return DraftTrainer(draft)


@cache
def colocated(encoding: Encoding, *epochs: tuple[Prompt, ...], together: bool = False) -> Learned:
    """No store and no queue: the target's batches go straight into the trainer. Each epoch ends with its own step."""
    model = target(encoding)
    tensors, metadata = model.target_assets()
    assets = RunAssets(contract(encoding, model), json.loads(metadata["config"]), tensors, metadata)
    head, learner, history = assets.head(T2D), trainer(assets), []
    steps = [given[start : start + PER_STEP] for given in epochs for start in range(0, len(given), PER_STEP)]
    for step in steps:
        batches = [model.generate_batch(**pad_prompt(prompt)) for prompt in step]
        if head is not None:
            features = [_rounded(batch.tensors(), encoding) for batch in batches]
            batches = [Eagle3TargetBatch(**head.expand(each)) for each in features]
        result = learner.step([collate(batches)] if together else batches)
        history.append((result.loss, result.accuracies, result.grad_norm))
    return Learned(history, learner.state_tensors())


def _rounded(features: dict[str, Tensor], encoding: Encoding) -> dict[str, Tensor]:
    """fp8 is lossy, and so part of what is trained on; leaving out rows without supervision is not."""
    if encoding.aux_storage == "same":
        return features
    stored = encode_compact(features, fp8_aux=True, supervised_rows=False)
    return decode_compact(stored, samples.specs(features), sample_id="s")


class Run(pipeline.Run):
    """A run over a folder."""

    def __init__(self, folder: Path, encoding: Encoding) -> None:
        super().__init__(clock=pipeline.TurnableClock(), store=SharedDirStore(folder / "shards", durability="none"))
        self.folder, self.encoding, self.model = folder, encoding, target(encoding)

    def open(self, name: str, group: str = "main") -> LeaseQueue:
        assert isinstance(self.samples, MemoryLeaseQueue)
        return MemoryLeaseQueue(self.samples._server, "run", name, group)

    def produce_all(self, given: Sequence[Prompt]) -> None:
        self.feed(*given)
        worker = ProducerWorker(
            prompts=self.prompts,
            samples=self.samples,
            store=self.store,
            target=self.model,
            contract=contract(self.encoding, self.model),
            assets=self.model.target_assets,
            run_id="run",
            name="w",
            clock=self.clock,
        )
        stats = worker.run(threading.Event())
        assert (stats.produced, stats.dead) == (len(given), 0)

    def train(
        self,
        learner: DraftTrainer,
        queue: LeaseQueue,
        *,
        kind: str = "rounds",
        per_batch: int = 1,
        retain: bool = False,
    ) -> None:
        """All of a queue's samples."""
        assets = load_run_assets(self.store)
        options: dict[str, Any] = {"consumer": "t", "contract": assets.contract, "head": assets.head(T2D)}
        options |= {"clock": self.clock, "retain": retain}
        with (
            RoundStream(
                queue,
                self.store,
                ranks=Ranks.alone(),
                samples_per_step=PER_STEP,
                draft_vocab_size=int(T2D.sum()),
                **options,
            )
            if kind == "rounds"
            else SampleStream(queue, self.store, **options) as stream
        ):
            training = TrainingRun(
                learner,
                stream,
                self.folder,
                contract=assets.contract.id,
                samples_per_step=PER_STEP,
                samples_per_batch=per_batch,
            )
            assert training.train() == STEPS
        assert (queue.stats().done, queue.stats().dead) == (NUM, 0)

    def learned(self, learner: DraftTrainer) -> Learned:
        rows = [json.loads(line) for line in (self.folder / "history.jsonl").read_text().splitlines()]
        history = [(row["loss"], tuple(row["accuracies"]), row["grad_norm"]) for row in rows]
        return Learned(history, learner.state_tensors())


def streamed(folder: Path, encoding: Encoding, given: Sequence[Prompt], **options: Any) -> Learned:
    run = Run(folder, encoding)
    run.produce_all(given)
    learner = trainer(load_run_assets(run.store))
    run.train(learner, run.samples, **options)
    return run.learned(learner)


def _name(value: object) -> str:
    return " ".join(value) if isinstance(value, Encoding) else str(value)


@pytest.mark.parametrize("encoding", ENCODINGS, ids=_name)
def test_the_stream_trains_as_the_target_in_this_process_does_bit_for_bit(encoding: Encoding, tmp_path: Path) -> None:
    result = streamed(tmp_path, encoding, prompts())
    assert_same(result, colocated(encoding, prompts()))
    assert len({loss for loss, *_ in result.history}) == STEPS
    assert all(loss > 0 and norm > 0 for loss, _, norm in result.history)


@pytest.mark.parametrize("encoding", [LOGITS, FP8], ids=_name)
def test_a_sample_stream_does_as_the_rounds_of_one_rank_do(encoding: Encoding, tmp_path: Path) -> None:
    result = streamed(tmp_path, encoding, prompts(), kind="samples")
    assert_same(result, colocated(encoding, prompts()))


@pytest.mark.parametrize("encoding", [LOGITS, PROBS, SUPERVISED], ids=_name)
def test_packed_rows_too(encoding: Encoding, tmp_path: Path) -> None:
    result = streamed(tmp_path, encoding, prompts(packed=True))
    assert_same(result, colocated(encoding, prompts(packed=True)))
    assert result.history != colocated(encoding, prompts()).history


@pytest.mark.parametrize("encoding", [LOGITS, PROBS, FP8], ids=_name)
def test_samples_that_are_padded_together_too(encoding: Encoding, tmp_path: Path) -> None:
    result = streamed(tmp_path, encoding, prompts(), per_batch=PER_STEP)
    assert_same(result, colocated(encoding, prompts(), together=True))


@pytest.mark.parametrize("encoding", [PROBS, FP8], ids=_name)
def test_a_replayed_epoch_trains_as_the_target_does_on_the_same_order(encoding: Encoding, tmp_path: Path) -> None:
    run = Run(tmp_path, encoding)
    run.produce_all(prompts())
    learner = trainer(load_run_assets(run.store))
    run.train(learner, run.samples, retain=True)
    replay(run.store, run.open, "run", seed=1, max_depth=NUM)
    epoch = run.open("samples.e1")
    order = [int(item.id.removeprefix("p-")) for item in epoch.payloads()]
    assert sorted(order) == list(range(NUM)) != order
    run.train(learner, epoch)
    assert list(run.store.scan()) == []
    assert_same(run.learned(learner), colocated(encoding, prompts(), tuple(prompts()[index] for index in order)))


@pytest.mark.parametrize("encoding", [PROBS, COMPACT], ids=_name)
@pytest.mark.parametrize(
    ("dtype", "loss_rel", "update_rel"),
    [
        ("float32", 1e-6, 1e-4),  # the same softmax of the same numbers, in another order of memory
        # Where probabilities or logits are rounded to 8 bits, each is off by up to 2^-9 of itself; a cross-entropy
        # -sum p log q, all of whose terms have one sign, then is too.
        ("bfloat16", 2**-9, 0.05),
    ],
)
def test_other_encodings_train_as_logits_do_within_the_rounding_of_what_they_store(
    encoding: Encoding, dtype: str, loss_rel: float, update_rel: float
) -> None:
    result = colocated(encoding._replace(dtype=dtype), prompts())
    wanted = colocated(LOGITS._replace(dtype=dtype), prompts())
    assert [row[0] for row in result.history] == pytest.approx([row[0] for row in wanted.history], rel=loss_rel)
    assert [row[1] for row in result.history] == [row[1] for row in wanted.history], "the same best tokens"
    start, ends = _weights(colocated(LOGITS._replace(dtype=dtype))), (_weights(result), _weights(wanted))
    assert torch.dist(*ends) <= update_rel * torch.dist(start, ends[1])
    assert torch.dist(start, ends[1]) > 0.01, "it did learn"


def _weights(learned: Learned) -> Tensor:
    return torch.cat([tensor.flatten() for name, tensor in learned.tensors.items() if name.startswith("draft.")])

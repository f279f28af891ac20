"""A run in one process: both queues, a store, prompts, and producers over a target that costs nothing."""

import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import samples
from eaglefeed.clock import Clock, ManualClock, SystemClock
from eaglefeed.producer.worker import ProducerStats, ProducerWorker
from eaglefeed.queue.base import LeaseQueue, QueueItem
from eaglefeed.queue.memory import MemoryLeaseQueue, MemoryServer
from eaglefeed.schema.batch import Eagle3TargetBackend, Eagle3TargetBatch
from eaglefeed.schema.contract import RunContract
from eaglefeed.schema.prompt import Prompt, PromptRow, encode_prompt
from eaglefeed.storage.base import FeatureStore
from eaglefeed.storage.memory import MemoryStore

VOCAB = 50


class EchoTarget(Eagle3TargetBackend):
    """Its states say which tokens they were made of, so that a mixed-up sample shows."""

    def __init__(self) -> None:
        self.calls = 0
        self.before = lambda ids: None

    def generate_batch(self, input_ids: Tensor, attention_mask: Tensor, loss_mask: Tensor) -> Eagle3TargetBatch:
        self.calls += 1
        self.before(input_ids)
        shifted = torch.nn.functional.pad(input_ids[:, 1:], (0, 1))
        shifted_mask = torch.nn.functional.pad(loss_mask[:, 1:], (0, 1))
        logits = torch.nn.functional.one_hot(shifted, VOCAB).float() * shifted.ne(0).unsqueeze(-1)
        return Eagle3TargetBatch(
            aux_hidden_states=input_ids.unsqueeze(-1).float().expand(-1, -1, 3 * samples.H).contiguous(),
            input_ids=shifted,
            attention_mask=attention_mask,
            loss_mask=shifted_mask,
            logits=logits,
        )

    def get_input_embeddings(self) -> Any:
        raise NotImplementedError

    def set_vocab_mapping(self, selected_token_ids: Tensor, selected_token_mask: Tensor) -> None:
        raise NotImplementedError


def contract(**changes: object) -> RunContract:
    fields: dict[str, object] = {
        "target": "echo",
        "target_fingerprint": "echo-1",
        "dtype": "float32",
        "hidden_size": samples.H,
        "vocab_size": VOCAB,
        "aux_layer_ids": (1, 2, 3),
        "supervision": "logits",
        "vocab_map_digest": "",
        "tokenizer_fingerprint": "t",
        "template_fingerprint": "p",
        "max_length": 0,
        "schema_version": 1,
    }
    return RunContract(**(fields | changes))


def prompt(index: int, **changes: object) -> Prompt:
    """Prompt `p-<index>`, whose tokens are 1 + index, 2, 3."""
    fields: dict[str, object] = {
        "sample_id": f"p-{index}",
        "rows": (PromptRow((1 + index, 2, 3), (0, 1, 1)),),
        "tokenizer_fingerprint": "t",
        "template_fingerprint": "p",
        "max_length": 16,
    }
    return Prompt(**(fields | changes))


class TurnableClock(SystemClock):
    """The machine's clock, which runs and sleeps by itself, and can be turned forward as well."""

    def __init__(self) -> None:
        self._offset_s = 0.0

    def time(self) -> float:
        return super().time() + self._offset_s

    def monotonic(self) -> float:
        return super().monotonic() + self._offset_s

    def advance(self, seconds: float) -> None:
        self._offset_s += seconds


@dataclass
class Run:
    """Everything of a run."""

    clock: ManualClock | TurnableClock = field(default_factory=ManualClock)
    store: FeatureStore = field(default_factory=MemoryStore)
    target: EchoTarget = field(default_factory=EchoTarget)

    def __post_init__(self) -> None:
        server = MemoryServer(self.clock)
        self.prompts: LeaseQueue = MemoryLeaseQueue(server, "run", "prompts")
        self.samples: LeaseQueue = MemoryLeaseQueue(server, "run", "samples")

    def feed(self, *prompts: Prompt, close: bool = True) -> None:
        self.prompts.put([QueueItem(each.sample_id, encode_prompt(each)) for each in prompts])
        if close:
            self.prompts.close()

    def worker(
        self, *, name: str = "w", own: RunContract | None = None, clock: Clock | None = None, **options: Any
    ) -> ProducerWorker:
        return ProducerWorker(
            prompts=self.prompts,
            samples=self.samples,
            store=self.store,
            target=self.target,
            contract=own or contract(),
            assets=lambda: ({"norm.weight": torch.ones(samples.H)}, {"config": "{}"}),
            run_id="run",
            name=name,
            clock=clock or self.clock,
            **options,
        )

    def produce(self, **options: Any) -> ProducerStats:
        return self.worker(**options).run(threading.Event())

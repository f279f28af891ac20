"""Peak memory of a producer and of a trainer, each in a fresh process: `python -m eaglefeed.bench.storage_memory ROLE`.

The task is a line on stdin, the answer a line on stdout. A real ProducerWorker runs over a target that costs nothing
but its tensors; a real SampleStream reads what that producer stored, for a loop that keeps as many samples as it may.
"""

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from eaglefeed import logs
from eaglefeed.bench.machine import process_bytes
from eaglefeed.bench.partners import Partner, say
from eaglefeed.bench.plan import Reading
from eaglefeed.bench.storage_plan import StoragePlan
from eaglefeed.clock import SYSTEM_CLOCK
from eaglefeed.consumer.stream import SampleStream
from eaglefeed.errors import EaglefeedError
from eaglefeed.producer.worker import ProducerWorker
from eaglefeed.queue.base import MAX_BATCH, Lease, LeaseQueue, QueueItem
from eaglefeed.queue.memory import MemoryLeaseQueue, MemoryServer
from eaglefeed.schema.batch import Eagle3TargetBackend, Eagle3TargetBatch
from eaglefeed.schema.contract import RunContract
from eaglefeed.schema.prompt import Prompt, PromptRow, encode_prompt
from eaglefeed.schema.refs import decode_ref
from eaglefeed.schema.values import shift_left
from eaglefeed.storage.base import open_store

__all__ = ["PRODUCER_RING", "TRAINER_RING", "main", "measure_memory"]

_PREFETCH, _HELD = 2, 4
PRODUCER_RING, TRAINER_RING = 1, _PREFETCH + _HELD + 1
"""Samples that a producer has written while it makes the next one, and buffers of the trainer's ring."""
_WARM_UP_TOKENS = 8
_STEP_S = 0.2
"""The loop's pause, in which the stream reads as far ahead as it may."""
_TIMEOUT_S = 300.0
_MB = 1e6


def measure_memory(folder: Path, plan: StoragePlan) -> Iterator[Reading]:
    """Peak memory beyond what each process had before its first sample, in samples.

    A sample of 8 tokens goes through before: what libraries load and threads take at their first call is no sample's.
    """
    folder.mkdir()
    produced = _ask(
        "producer",
        folder=str(folder),
        plan=[plan.memory_tokens, plan.hidden, plan.draft_vocab],
        samples=plan.memory_samples,
    )
    trained = _ask("trainer", folder=str(folder), warm_up=produced["warm_up"], refs=produced["refs"])
    for role, told in (("producer", produced), ("trainer", trained)):
        if told["num_samples"] != plan.memory_samples:
            what = f"the {role} lost samples"
            raise EaglefeedError(what, subject="bench storage", wanted=plan.memory_samples, got=told["num_samples"])
        yield Reading(f"memory.{role}", "samples", told["peak_bytes"] / produced["sample_bytes"])
    yield Reading("memory.one_sample", "MB", produced["sample_bytes"] / _MB)


def _ask(role: str, **task: object) -> dict[str, Any]:
    command = [sys.executable, "-m", "eaglefeed.bench.storage_memory", role]
    with Partner(f"bench storage_memory {role}", command, task) as partner:
        return partner.line(_TIMEOUT_S)


class _CheapTarget(Eagle3TargetBackend):
    """Ones as states, and all probability on one token; D and H as wanted."""

    def __init__(self, hidden: int, draft_vocab: int) -> None:
        self._hidden, self._draft_vocab = hidden, draft_vocab

    def generate_batch(
        self, input_ids: Tensor, attention_mask: Tensor, loss_mask: Tensor, **_packing: Tensor | None
    ) -> Eagle3TargetBatch:
        """See Eagle3TargetBackend; its rows are never packed."""
        length = input_ids.shape[1]
        probs = torch.empty(1, length, self._draft_vocab, dtype=torch.bfloat16).fill_(0)
        probs[:, :-1, 0] = 1
        supervised = shift_left(loss_mask)
        return Eagle3TargetBatch(
            aux_hidden_states=torch.ones(1, length, 3 * self._hidden, dtype=torch.bfloat16),
            input_ids=shift_left(input_ids),
            attention_mask=attention_mask,
            loss_mask=supervised,
            target_probs=probs,
            position_mask=supervised.bool().unsqueeze(-1),
        )

    def get_input_embeddings(self) -> NoReturn:
        """Nobody asks here."""
        raise NotImplementedError

    def set_vocab_mapping(self, selected_token_ids: Tensor, selected_token_mask: Tensor) -> NoReturn:
        """Nobody asks here."""
        raise NotImplementedError


def _contract(hidden: int, draft_vocab: int) -> RunContract:
    return RunContract(
        target="bench",
        target_fingerprint="bench",
        dtype="bfloat16",
        hidden_size=hidden,
        vocab_size=draft_vocab,
        aux_layer_ids=(1, 2, 3),
        supervision="target_probs",
        vocab_map_digest="bench",
        tokenizer_fingerprint="bench",
        template_fingerprint="bench",
        max_length=0,
        schema_version=1,
    )


def _prompt(number: int, tokens: int) -> QueueItem:
    prompt = Prompt(
        sample_id=f"s-{number}",
        rows=(PromptRow((1,) * tokens, (1,) * tokens),),
        tokenizer_fingerprint="bench",
        template_fingerprint="bench",
        max_length=tokens,
    )
    return QueueItem(prompt.sample_id, encode_prompt(prompt))


def _queues() -> tuple[LeaseQueue, LeaseQueue]:
    server = MemoryServer(SYSTEM_CLOCK)
    return MemoryLeaseQueue(server, "bench", "prompts"), MemoryLeaseQueue(server, "bench", "samples")


def _produce(task: dict[str, Any]) -> dict[str, Any]:
    folder, (tokens, hidden, draft_vocab) = Path(task["folder"]), task["plan"]
    warm_up = _run_producer(folder / "warm-up", 1, _WARM_UP_TOKENS, hidden, draft_vocab)
    before = process_bytes("VmRSS")
    payloads = _run_producer(folder / "store", task["samples"], tokens, hidden, draft_vocab)
    peak_bytes = process_bytes("VmHWM") - before
    return {
        "peak_bytes": peak_bytes,
        "num_samples": len(payloads),
        "sample_bytes": decode_ref(payloads[0]).estimated_bytes,
        "warm_up": [payload.hex() for payload in warm_up],
        "refs": [payload.hex() for payload in payloads],
    }


def _run_producer(folder: Path, count: int, tokens: int, hidden: int, draft_vocab: int) -> list[bytes]:
    """Make samples and store them; returns their refs."""
    prompts, samples = _queues()
    prompts.put([_prompt(number, tokens) for number in range(count)])
    prompts.close()
    ProducerWorker(
        prompts=prompts,
        samples=samples,
        store=open_store(f"file://{folder}", durability="none"),
        target=_CheapTarget(hidden, draft_vocab),
        contract=_contract(hidden, draft_vocab),
        assets=lambda: ({"norm.weight": torch.ones(hidden)}, {"config": "{}"}),
        run_id="bench",
        name="bench",
    ).run(threading.Event())
    payloads = []
    while isinstance(lease := samples.lease(MAX_BATCH, visibility_timeout_s=60.0, consumer="bench"), Lease):
        payloads += [item.payload for item in lease.items]
    return payloads


def _train(task: dict[str, Any]) -> dict[str, Any]:
    folder, refs = Path(task["folder"]), [bytes.fromhex(text) for text in task["refs"]]
    _run_trainer(folder / "warm-up", [bytes.fromhex(text) for text in task["warm_up"]])
    before = process_bytes("VmRSS")
    num_taken = _run_trainer(folder / "store", refs)
    return {"peak_bytes": process_bytes("VmHWM") - before, "num_samples": num_taken}


def _run_trainer(folder: Path, payloads: list[bytes]) -> int:
    """A loop that keeps a step's samples until the next step is done, as many as it may; returns how many came."""
    _, samples = _queues()
    refs = map(decode_ref, payloads)
    samples.put(
        [QueueItem(ref.sample_id, payload, ref.stored_bytes) for ref, payload in zip(refs, payloads, strict=True)]
    )
    samples.close()
    with SampleStream(
        samples, open_store(f"file://{folder}"), consumer="bench", prefetch=_PREFETCH, held=_HELD
    ) as stream:
        kept: list[Eagle3TargetBatch] = []
        num_taken = 0
        while not stream.ended:
            taken = stream.take(_HELD // 2)
            stream.ack()
            SYSTEM_CLOCK.sleep(_STEP_S)
            kept = taken or kept
            num_taken += len(taken)
    return num_taken


def main() -> None:
    """Do the task that stands on stdin."""
    logs.configure("ERROR")  # on stderr: stdout is for what we say
    task = json.loads(sys.stdin.readline())
    say(**{"producer": _produce, "trainer": _train}[sys.argv[1]](task))


if __name__ == "__main__":
    main()

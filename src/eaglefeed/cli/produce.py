"""`eaglefeed produce`: run the target over prompts."""

import threading
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

import typer

from eaglefeed import logs
from eaglefeed.cli.common import (
    ConfigOption,
    EngineOption,
    JsonOption,
    RedisOption,
    RunOption,
    RunQueues,
    StoreOption,
    TargetOption,
    VocabOption,
    emit,
    open_queues,
    opened_store,
    read_settings,
    stop_on_signals,
    worker_name,
)
from eaglefeed.cli.journaling import journaled
from eaglefeed.cli.reports import human_bytes
from eaglefeed.cli.showing import run_shown, show_producer, showing
from eaglefeed.cli.snapshots import ProducerSnapshot, starting_snapshot
from eaglefeed.config import Settings
from eaglefeed.errors import EaglefeedError
from eaglefeed.queue import open_queue
from eaglefeed.storage.options import PeerOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from eaglefeed.producer.engine import Eagle3Target
    from eaglefeed.schema.contract import RunContract
    from eaglefeed.schema.vocab import VocabMapping

__all__ = ["produce"]

_TIDY_S, _KEEPER_TIDY_S = 600.0, 30.0
"""How often a janitor collects; what is left in memory costs room for samples."""


def produce(
    ctx: typer.Context,
    vocab: VocabOption = None,
    run: RunOption = None,
    redis: RedisOption = None,
    store: StoreOption = None,
    target: TargetOption = None,
    engine: EngineOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Lease prompts, run the target, write shards and hand them to the trainers, until the prompts are drained."""
    settings = read_settings(
        ctx,
        config,
        run__id=run,
        redis_url=redis,
        store__uri=store,
        target__name=target,
        target__engine=engine,
        produce__vocab=vocab,
    )
    logs.bind(role="producer", worker=worker_name())
    from eaglefeed.cli.targets import opened_target, target_tokenizer, vocabulary_map
    from eaglefeed.producer.ledger import QueueLedger
    from eaglefeed.producer.loading import tokenizer_fingerprint
    from eaglefeed.producer.worker import ProducerWorker
    from eaglefeed.storage.janitor import Janitor

    tokenizer = target_tokenizer(settings)
    mapping = vocabulary_map(settings, tokenizer_fingerprint(tokenizer))
    stop = threading.Event()
    opened = opened_store(settings, keeps=True, peer=PeerOptions(device=settings.target.device))
    is_compact = settings.produce.supervision == "last_hidden_states"
    loaded = opened_target(settings, compact=is_compact)
    with (
        opened as shards,
        open_queues(settings) as queues,
        showing(settings, "producer") as shown,
        run_shown(shown, queues),
        stop_on_signals(stop.set),
        ExitStack() as stack,
    ):
        starting = partial(starting_snapshot, settings, "producer")
        with _last_words(queues), journaled(queues, "producer", worker_name(), starting, goes_on=True):
            backend = stack.enter_context(loaded)
        if mapping is not None:
            backend.set_vocab_mapping(mapping.selected_token_ids, mapping.selected_token_mask)
        tidy_s = _KEEPER_TIDY_S if shards.stays_with_producer else _TIDY_S
        worker = ProducerWorker(
            prompts=queues.prompts,
            samples=queues.samples,
            store=shards,
            target=backend,
            contract=_contract(settings, backend, tokenizer, mapping),
            assets=lambda: _assets(backend, mapping),
            run_id=settings.run.id,
            name=worker_name(),
            lease_batch=settings.produce.lease_batch,
            visibility_timeout_s=settings.queue.visibility_timeout_s,
            stall_timeout_s=settings.queue.stall_timeout_s,
            max_lease_age_s=settings.queue.max_lease_age_s,
            max_attempts=settings.queue.max_deliveries,
            tidy=Janitor(shards, QueueLedger(settings.run.id, queues.named), interval_s=tidy_s).maybe_run,
        )
        before = queues.prompts.stats().done
        show_producer(shown, queues, worker.stats)
        with journaled(queues, "producer", worker_name(), ProducerSnapshot(settings, worker.stats)):
            stats = worker.run(stop)
    line = (
        f"produced {stats.produced} samples ({stats.num_tokens} tokens, {human_bytes(stats.num_bytes)}), "
        f"{stats.dead} dead, {stats.retried} retried, {stats.returned} given back, {stats.stale} stale, "
        f"waited {stats.paused_s:.1f} s for room and {stats.write_wait_s:.1f} s for the store"
    )
    line += f"; skipped {before}, which had their samples before" if before else ""
    emit(as_json, asdict(stats) | {"skipped": before}, [line])


@contextmanager
def _last_words(queues: RunQueues) -> "Iterator[None]":
    """Leave the error for trainers, which would else wait for producers and not know why there are none."""
    try:
        yield
    except Exception as error:
        prompts = open_queue(queues.client.impatient(), queues.run, queues.prompts.name)
        with suppress(EaglefeedError):
            prompts.farewell("producer", worker_name(), error=EaglefeedError.text_of(error))
        raise


def _assets(backend: "Eagle3Target", mapping: "VocabMapping | None") -> "tuple[dict[str, Tensor], dict[str, str]]":
    tensors, metadata = backend.target_assets()
    return (tensors | {"t2d": mapping.t2d} if mapping else tensors), metadata


def _contract(
    settings: Settings, backend: "Eagle3Target", tokenizer: "PreTrainedTokenizerBase", mapping: "VocabMapping | None"
) -> "RunContract":
    from eaglefeed.producer.loading import template_fingerprint, tokenizer_fingerprint
    from eaglefeed.schema.contract import RunContract
    from eaglefeed.schema.eagle3 import EAGLE3_SCHEMA_VERSION
    from eaglefeed.schema.eagle3_compact import EAGLE3_COMPACT_SCHEMA_VERSION

    produce = settings.produce
    is_compact = produce.supervision == "last_hidden_states"
    return RunContract(
        target=settings.target.name,
        target_fingerprint=backend.fingerprint(),
        dtype=backend.dtype,
        hidden_size=backend.hidden_size,
        vocab_size=backend.vocab_size,
        aux_layer_ids=backend.aux_layer_ids,
        supervision=produce.supervision,
        aux_storage=produce.aux_storage,
        supervision_rows=produce.supervision_rows,
        head_digest=backend.head_digest() if is_compact else "",
        vocab_map_digest=mapping.digest if mapping else "",
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
        template_fingerprint=template_fingerprint(tokenizer),
        max_length=settings.feed.max_length,
        schema_version=EAGLE3_COMPACT_SCHEMA_VERSION if is_compact else EAGLE3_SCHEMA_VERSION,
    )

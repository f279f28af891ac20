"""`eaglefeed feed`: conversations into the prompts queue."""

import errno
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Annotated, NamedTuple

import msgpack
import typer

from eaglefeed.cli.common import (
    ConfigOption,
    JsonOption,
    RedisOption,
    RunOption,
    RunQueues,
    StoreOption,
    TargetOption,
    VocabOption,
    emit,
    is_with_producers,
    open_queues,
    opened_store,
    read_settings,
)
from eaglefeed.cli.feed_agreement import agree, waits_for_others
from eaglefeed.cli.feed_note import noted
from eaglefeed.cli.limits import check_limits, check_peer_bytes, configure_queues, queue_limits
from eaglefeed.cli.replay import replay_epoch
from eaglefeed.cli.reports import describe_read, human_bytes, refusal_told
from eaglefeed.clock import SYSTEM_CLOCK
from eaglefeed.config import Settings
from eaglefeed.errors import ConfigError, IdConflict, QueueFull, QueueUnavailable
from eaglefeed.producer.feed_record import FeedRecord, note_whole
from eaglefeed.producer.jsonl import ReadReport
from eaglefeed.producer.ledger import QueueLedger
from eaglefeed.producer.rebuild import has_unknown_shards
from eaglefeed.queue.base import LeaseQueue, QueueItem, QueueLimits
from eaglefeed.storage.base import ENDLESS, FeatureStore, StoreHealth

__all__ = ["feed"]

_CHUNK, _CONFLICTS_CODE = 500, 3
_FULL_WAIT_S, _FULL_PAUSE_S = 600.0, 1.0
_PACKING_HELP = "Fill rows with several conversations each. Producers and trainers see it from the items."
_DRY_HELP = "Queue nothing: say how much the samples would take, and whether there is room."
_REPLAY_HELP = "Queue what trainers retained (train.retain=true) as the run's next epoch."


class Estimate(NamedTuple):
    """What the run will take: work items, tokens, bytes of all samples, bytes of the largest."""

    items: int
    tokens: int
    num_bytes: int
    largest_bytes: int


@dataclass
class Fed:
    """What became of the items: new ones, known ones, those whose samples a rebuilt queue holds, conflicting ids."""

    queued: int = 0
    known: int = 0
    produced: int = 0
    conflicts: list[str] = field(default_factory=list)


def feed(
    ctx: typer.Context,
    conversations: Annotated[
        Path | None, typer.Argument(help="JSONL with finished conversations.", show_default=False)
    ] = None,
    replay: Annotated[bool, typer.Option("--replay", help=_REPLAY_HELP)] = False,
    epoch: Annotated[int | None, typer.Option(min=1, help="Epoch to replay into; the next one by default.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the replayed epoch's order; train.seed by default.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Rows of one sample.")] = None,
    max_length: Annotated[int | None, typer.Option(min=2, help="Tokens that a row is cut to.")] = None,
    packing: Annotated[bool, typer.Option("--packing", help=_PACKING_HELP)] = False,
    keep_open: Annotated[bool, typer.Option("--keep-open", help="More will be fed: do not close the prompts.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help=_DRY_HELP)] = False,
    vocab: VocabOption = None,
    run: RunOption = None,
    redis: RedisOption = None,
    store: StoreOption = None,
    target: TargetOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Tokenize conversations with the target's chat template and queue them for producers.

    With --replay there are no conversations: the samples that trainers retained become the next epoch.
    """
    settings = read_settings(
        ctx,
        config,
        run__id=run,
        redis_url=redis,
        store__uri=store,
        target__name=target,
        feed__batch_size=batch_size,
        feed__max_length=max_length,
        feed__packing=packing or None,
        feed__keep_open=keep_open or None,
        produce__vocab=vocab,
        train__seed=seed,
    )
    if replay or conversations is None:
        shaping = {"--batch-size": batch_size, "--max-length": max_length, "--vocab": vocab}
        shaping |= {"--packing": packing or None, "--keep-open": keep_open or None, "--dry-run": dry_run or None}
        _check_replay(conversations, [name for name, value in shaping.items() if value is not None], replay=replay)
        replay_epoch(settings, epoch=epoch, as_json=as_json)
        return
    if epoch is not None or seed is not None:
        raise ConfigError("conversations are fed into the first epoch", subject="--epoch, --seed", fix="pass --replay")
    _feed_file(settings, conversations, dry_run=dry_run, as_json=as_json)


def _feed_file(settings: Settings, conversations: Path, *, dry_run: bool, as_json: bool) -> None:
    report = ReadReport()
    with _spooled() as spool, opened_store(settings) as shards:
        with refusal_told(report, conversations, as_json=as_json):
            estimate, record = _tokenize(settings, conversations, report, spool)
        health = shards.health()
        limits = queue_limits(settings, health)
        document, lines = describe_read(report, conversations)
        lines += _say(estimate, limits, health, settings)
        if not as_json:
            emit(False, {}, lines)
        check_limits(limits, settings, estimate.largest_bytes, health)
        if is_with_producers(settings):
            check_peer_bytes(settings, estimate.largest_bytes)
        document |= estimate._asdict()
        if dry_run:
            emit(as_json, document | {"free_bytes": health.free_bytes}, ["nothing was queued"])
            return
        with open_queues(settings) as queues, noted(settings, queues, conversations, document) as fact:
            file = agree(queues, record, conversations)
            configure_queues(settings, queues, limits)
            _warn_of_shards_from_before(queues, shards)
            fed = _put_all(queues, spool)
            fact |= asdict(fed)
            note_whole(queues.samples, file)
            if not settings.feed.keep_open and not waits_for_others(queues, is_new=fed.queued > 0):
                _close(queues)
    emit(as_json, document | asdict(fed) | {"run": settings.run.id}, [_told(settings.run.id, fed)])
    if fed.conflicts:
        raise typer.Exit(_CONFLICTS_CODE)


def _told(run: str, fed: Fed) -> str:
    told = f"run {run}: queued {fed.queued} items, {fed.known} were queued before"
    told += f", {fed.produced} have their samples already" if fed.produced else ""
    return told + (f", {len(fed.conflicts)} with another content" if fed.conflicts else "")


def _check_replay(conversations: Path | None, shaping: list[str], *, replay: bool) -> None:
    if not replay:
        fix = "eaglefeed feed CONVERSATIONS, or --replay for another epoch of what was retained"
        raise ConfigError("no conversations", subject="feed", wanted="a JSONL file", fix=fix)
    if conversations is not None:
        what, fix = "a replay takes no conversations", "leave one of both out"
        raise ConfigError(what, subject="--replay", got=str(conversations), fix=fix)
    if shaping:
        what, fix = "a replay takes samples as they are stored", "leave these out; they shape what is fed"
        raise ConfigError(what, subject="--replay", got=", ".join(shaping), fix=fix)


@contextmanager
def _spooled() -> Iterator[IO[bytes]]:
    try:
        with tempfile.TemporaryFile() as spool:
            yield spool
    except OSError as error:  # also of its end, which writes what is left once more
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        what, folder = f"no room for the tokenized conversations ({error.strerror})", tempfile.gettempdir()
        raise ConfigError(what, subject=folder, fix="free space there, or set TMPDIR to a folder with more") from None


def _tokenize(settings: Settings, path: Path, report: ReadReport, spool: IO[bytes]) -> tuple[Estimate, FeedRecord]:
    """Write every work item to the spool, so that all is known before the first one is queued."""
    from eaglefeed.cli.prompts import PromptReader
    from eaglefeed.cli.targets import vocabulary_map
    from eaglefeed.producer.sizes import Encoding, sample_bytes, target_sizes
    from eaglefeed.schema.prompt import encode_prompt

    target = settings.target
    remote = target.trust_remote_code
    sizes = target_sizes(target.name, target.cache_dir, trust_remote_code=remote, engine=target.engine)
    reader = PromptReader(settings, max_positions=sizes.max_positions, vocab_size=sizes.vocab_size)
    mapping = vocabulary_map(settings, reader.tokenizer_fingerprint, vocab_size=sizes.vocab_size)
    produce, draft_size = settings.produce, mapping.draft_vocab_size if mapping else 0
    encoding = Encoding(produce.supervision, produce.aux_storage, produce.supervision_rows, draft_size)
    items = tokens = total = largest = 0
    for prompt in reader.read(path, report):
        spool.write(msgpack.packb([prompt.sample_id, encode_prompt(prompt)]))
        size = sample_bytes(prompt, sizes, encoding, dtype=settings.target.dtype)
        items, tokens, total = items + 1, tokens + prompt.num_tokens, total + size
        largest = max(largest, size)
    spool.seek(0)
    return Estimate(items, tokens, total, largest), reader.record


def _say(estimate: Estimate, limits: QueueLimits, health: StoreHealth, settings: Settings) -> list[str]:
    at_once = min(estimate.num_bytes, limits.high_bytes)
    free = "it has no end" if health == ENDLESS else f"{human_bytes(health.free_bytes)} are free"
    lines = [
        f"{estimate.items} items, {estimate.tokens} tokens",
        f"samples take {human_bytes(estimate.num_bytes)} in all, the largest {human_bytes(estimate.largest_bytes)}",
        f"{settings.store_uri}: at most {human_bytes(at_once)} at once, {free}",
    ]
    if estimate.num_bytes > health.free_bytes:
        then = (
            "train.retain keeps them all, so it will fill" if settings.train.retain else "producers wait for trainers"
        )
        lines.append(f"the samples take more than is free: {then}")
    return lines


def _warn_of_shards_from_before(queues: RunQueues, store: FeatureStore) -> None:
    if has_unknown_shards(store, QueueLedger(queues.run, queues.named)):
        what = f"{store.uri}: shards of run {queues.run} lie here that its queue does not know, their samples are made "
        fix = "again; to use them, stop, `eaglefeed queue purge`, `eaglefeed store rebuild`, feed again"
        sys.stderr.write(f"eaglefeed: {what}{fix}\n")


def _put_all(queues: RunQueues, spool: IO[bytes]) -> Fed:
    fed = Fed()
    items = (QueueItem(sample_id, payload) for sample_id, payload in msgpack.Unpacker(spool, max_buffer_size=2**31 - 1))
    while chunk := list(islice(items, _CHUNK)):
        missing = _without_samples(queues, chunk)
        fed.produced += len(chunk) - len(missing)
        _put(queues.prompts, missing, fed)
    return fed


def _close(queues: RunQueues) -> None:
    """Close the prompts; if all have their samples, no producer will come to close these."""
    queues.prompts.close()
    if queues.prompts.stats().unsettled == 0:
        queues.samples.close()


def _without_samples(queues: RunQueues, chunk: list[QueueItem]) -> list[QueueItem]:
    """Leave out prompts that only the samples know: a rebuilt queue has their samples, and would refuse others."""
    known = queues.samples.known([item.id for item in chunk])
    known -= queues.prompts.known(known)
    return [item for item in chunk if item.id not in known]


def _put(prompts: LeaseQueue, chunk: list[QueueItem], fed: Fed) -> None:
    """Put a chunk without the ids that stand for something else already; a full queue or server is waited for."""
    deadline_s = SYSTEM_CLOCK.monotonic() + _FULL_WAIT_S
    while chunk:
        try:
            result = prompts.put(chunk)
        except IdConflict as error:
            sys.stderr.write(f"eaglefeed: {error}\n")
            fed.conflicts.append(error.item_id)
            chunk = [item for item in chunk if item.id != error.item_id]
        except (QueueFull, QueueUnavailable) as error:
            if SYSTEM_CLOCK.monotonic() > deadline_s or not (isinstance(error, QueueFull) or error.is_full):
                raise
            sys.stderr.write(f"eaglefeed: {error}\n")
            SYSTEM_CLOCK.sleep(_FULL_PAUSE_S)
        else:
            fed.queued, fed.known = fed.queued + result.accepted, fed.known + result.duplicate
            return

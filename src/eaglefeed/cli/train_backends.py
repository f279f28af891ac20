"""What `eaglefeed train` is on a target: in this process, or on servers; a BackendStream over a conversations file."""

import json
import threading
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from eaglefeed.cli.common import RunQueues, access_token
from eaglefeed.cli.prompts import PromptReader
from eaglefeed.cli.reports import describe_read
from eaglefeed.cli.targets import compare_target
from eaglefeed.config import Settings
from eaglefeed.errors import ConfigError
from eaglefeed.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from eaglefeed.consumer.backend_stream import BackendStream
    from eaglefeed.consumer.source import BatchSource
    from eaglefeed.consumer.trainer import DraftTrainer
    from eaglefeed.schema.batch import Eagle3TargetBackend
    from eaglefeed.schema.contract import RunContract
    from eaglefeed.schema.protocol import ModelInfo
    from eaglefeed.schema.vocab import VocabMapping

__all__ = ["TargetSource", "target_source"]

T = TypeVar("T")

_LISTEN_S = 1800.0  # a server listens once its target is loaded
_SERVE_FIX = "start `eaglefeed serve-target` with {}"
_NAME_FIX = "pass with --target what the servers serve: its tokenizer and chat template are read from there"

log = get_logger(__name__)


class _Opened(NamedTuple):
    """A target, what a run's contract calls it, and what it says of itself."""

    name: str
    backend: "Eagle3TargetBackend"
    info: "ModelInfo"
    assets: "tuple[dict[str, Tensor], dict[str, str]]"


@contextmanager
def target_source(settings: Settings, conversations: Path) -> "Iterator[TargetSource]":
    """The target that settings name, over the conversations.

    Raises:
        ConfigError: no such file.
        SchemaError: the vocabulary map is another target's.
        TargetUnavailable: the target cannot be loaded, or none of its servers answers.
    """
    if not conversations.is_file():  # before a target is loaded for minutes
        raise ConfigError("no such file", subject=str(conversations), fix="pass a JSONL file with conversations")
    with _colocated(settings) if settings.train.target_backend == "colocated" else _remote(settings) as opened:
        yield TargetSource(settings, conversations, opened)


class TargetSource:
    """A TrainSource on a target's answers."""

    idle_s: float | None = None
    has_room: "Callable[[], bool] | None" = None
    queues: "RunQueues | None" = None

    def __init__(self, settings: Settings, conversations: Path, opened: _Opened) -> None:
        from eaglefeed.consumer.run import RunAssets
        from eaglefeed.producer.jsonl import ReadReport

        self._settings, self._conversations, self._opened = settings, conversations, opened
        info = opened.info
        self._reader = PromptReader(settings, max_positions=info.max_positions, vocab_size=info.vocab_size)
        if opened.name != settings.target.name:
            _require_tokens(self._reader.num_tokens, opened, settings.target.name)
        self._read = ReadReport()
        mapping = _mapping(settings, info.vocab_size, self._reader.tokenizer_fingerprint)
        tensors, metadata = opened.assets
        if mapping is not None:
            opened.backend.set_vocab_mapping(mapping.selected_token_ids, mapping.selected_token_mask)
            tensors = tensors | {"t2d": mapping.t2d}
        contract = _contract(opened, self._reader, mapping)
        self.assets = RunAssets(contract, json.loads(metadata["config"]), tensors, metadata)

    @contextmanager
    def stream(self, trainer: "DraftTrainer") -> "Iterator[BackendStream]":
        """A BackendStream behind what the newest checkpoint has seen."""
        from eaglefeed.consumer.backend_stream import BackendStream
        from eaglefeed.consumer.resume import resume

        train, contract = self._settings.train, self.assets.contract
        with BackendStream(
            self._opened.backend,
            self._reader.read(self._conversations, self._read, any_share=True),
            depth=train.target_prefetch_depth,
            values=self._settings.store.values,
            vocab_size=self._opened.info.vocab_size,
            device=train.device,
        ) as stream:
            resume(self._settings.train_output, trainer, stream, contract=contract, from_step=train.from_step)
            yield stream

    def drained(self, stream: "BatchSource") -> bool:
        """Whether the target has answered all conversations."""
        return stream.drained

    def report(self) -> tuple[dict[str, Any], list[str]]:
        """What became of the file's rows, as far as it was read."""
        return describe_read(self._read, self._conversations)


@contextmanager
def _colocated(settings: Settings) -> "Iterator[_Opened]":
    from eaglefeed.cli.targets import opened_target
    from eaglefeed.producer.opening import info_of

    with opened_target(settings) as target:
        name = settings.target.name
        yield _Opened(name, target, info_of(target, name), target.target_assets())


@contextmanager
def _remote(settings: Settings) -> "Iterator[_Opened]":
    from eaglefeed.consumer.remote import RemoteEagle3TargetModel
    from eaglefeed.schema.protocol import ModelInfo

    train = settings.train
    target = RemoteEagle3TargetModel.from_urls(
        train.remote_urls,
        device=train.device,
        timeout=train.remote_timeout_s,
        token=access_token(settings),
        data_plane=train.remote_data_plane,
    )
    with closing(target):
        started = partial(_started, train.start_timeout_s)
        info = ModelInfo(**_started(min(_LISTEN_S, train.start_timeout_s), target.model_info))
        compare_target(settings, info, "the servers' target has another value", _SERVE_FIX)
        started(target.check_ready)
        yield _Opened(_common_name(settings.target.name, info.target), target, info, started(target.target_assets))


def _started(timeout_s: float, call: "Callable[[], T]") -> "T":
    """A server that was started together with the trainer loads its target first, and runs its first forward."""
    from eaglefeed.consumer.target_outage import bear_target_outage

    return bear_target_outage(call, outage_s=timeout_s, stop=threading.Event())  # a signal interrupts the process here


def _common_name(own: str, theirs: str) -> str:
    """What a contract calls the target: as a run in this process does, unless the servers name another one.

    Of a target whose tokens another one's tokenizer made, every number would be right, and of other texts.
    """
    if PurePath(own).name == PurePath(theirs).name:
        return own
    log.warning("servers_name_another_target", own=own, theirs=theirs, fix=_NAME_FIX)
    return theirs


def _require_tokens(num_tokens: int, opened: _Opened, own: str) -> None:
    """Token ids that the servers' target does not have, some of them in no row until hours later."""
    if num_tokens > opened.info.vocab_size:
        what = f"the tokenizer has more tokens than the servers' target, {opened.name}"
        wanted = f"at most {opened.info.vocab_size} tokens"
        raise ConfigError(what, subject=own, wanted=wanted, got=num_tokens, fix=_NAME_FIX)


def _mapping(settings: Settings, vocab_size: int, tokenizer: str) -> "VocabMapping | None":
    """The draft vocabulary; a run's own file of settings may name it for its producers."""
    from eaglefeed.schema.vocab import VocabMapping

    path = settings.draft.vocab or settings.produce.vocab
    return VocabMapping.load(path, vocab_size=vocab_size).of_tokenizer(tokenizer) if path else None


def _contract(opened: _Opened, reader: PromptReader, mapping: "VocabMapping | None") -> "RunContract":
    """The same for one target in this process and on servers: a training may go on with the other."""
    from eaglefeed.schema.contract import RunContract
    from eaglefeed.schema.eagle3 import EAGLE3_SCHEMA_VERSION

    info = opened.info
    return RunContract(
        target=opened.name,
        target_fingerprint=info.target_fingerprint,
        dtype=info.dtype,
        hidden_size=info.hidden_size,
        vocab_size=info.vocab_size,
        aux_layer_ids=info.aux_layer_ids,
        aux_norm=info.aux_norm,
        supervision="logits" if mapping is None else "target_probs",
        vocab_map_digest="" if mapping is None else mapping.digest,
        tokenizer_fingerprint=reader.tokenizer_fingerprint,
        template_fingerprint=reader.template_fingerprint,
        max_length=reader.max_length,
        schema_version=EAGLE3_SCHEMA_VERSION,
    )

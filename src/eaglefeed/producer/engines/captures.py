"""The folder through which a vLLM server hands out captured states: one file a request, read once and deleted.

n tokens · K captured layers · H hidden size
"""

import fcntl
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eaglefeed.clock import SYSTEM_CLOCK, Clock
from eaglefeed.errors import ConfigError, TargetMismatch, TargetUnavailable
from eaglefeed.logs import get_logger

__all__ = ["CaptureFolder", "CaptureKind", "MissingCapture"]

_NAME = re.compile(r"cmpl-eaglefeed-[0-9a-f]{32}-[0-9A-Za-z-]{1,64}\.safetensors")
_ORPHANS = "cmpl-eaglefeed-*.safetensors*"
_LOOKS_S = (0.001, 0.05)
"""Between looks at a lock: at first, and at most."""
_log = get_logger(__name__)


class CaptureKind(NamedTuple):
    """What every capture of a target is like.

    Args:
        layers: vLLM's ids of what it captures, ascending: k is what enters layer k.
        hidden_size: H.
        dtype: of the states.
    """

    layers: tuple[int, ...]
    hidden_size: int
    dtype: torch.dtype


class MissingCapture(TargetUnavailable):
    """Nothing of a capture that the engine promised is in the folder."""


class CaptureFolder:
    """Takes captures out of a folder that a vLLM server with our connector writes to.

    Args:
        path: the folder, as it is seen here.
        kind: of the captures.
        clock: measures waits and ages.

    Raises:
        ConfigError: it is no folder, or files in it cannot be deleted.
    """

    def __init__(self, path: Path, kind: CaptureKind, clock: Clock = SYSTEM_CLOCK) -> None:
        self.path, self._kind, self._clock = path, kind, clock
        try:
            with tempfile.TemporaryFile(dir=path):
                pass
        except OSError as error:
            what = f"captures cannot be read and deleted there ({error.strerror})"
            raise ConfigError(what, subject=str(path), fix="pass a folder that this process may write to") from None

    def take(self, said: str, request_id: str, ids: list[int], timeout_s: float) -> Tensor:
        """The states [n, K, H] of a capture, which is deleted whatever happens.

        Args:
            said: its path, as the server says it; only the name counts, the folder may lie elsewhere there.
            request_id: of the request that it must belong to.
            ids: the request's [n] tokens.
            timeout_s: how long the server may still write it.

        Raises:
            TargetUnavailable: it never came, or came in part.
            TargetMismatch: it is not a capture of these tokens, or not of this kind.
        """
        name = PurePosixPath(said).name
        if not _NAME.fullmatch(name) or not name.startswith(f"cmpl-{request_id}-"):
            raise TargetMismatch("the engine names another request's capture", wanted=request_id, got=said)
        path = self.path / name
        try:
            self._wait(path, timeout_s)
            with _read(path) as file:
                return self._checked(file, ids)
        finally:
            self._delete([path, path.with_name(f"{name}.lock")])

    def sweep(self, min_age_s: float) -> int:
        """Delete what nobody came for: captures of clients that died or gave up; how many files."""
        end, old = self._clock.time() - min_age_s, []
        for path in self.path.glob(_ORPHANS):
            try:
                old += [path] * (path.stat().st_mtime < end)
            except FileNotFoundError:
                continue
        self._delete(old)
        if old:
            _log.warning("captures_swept", count=len(old), folder=str(self.path))
        return len(old)

    def _wait(self, path: Path, timeout_s: float) -> None:
        """Wait until the server, which locks the lock file before it answers, has let go of it."""
        end, pause = self._clock.monotonic() + timeout_s, _LOOKS_S[0]
        try:
            with path.with_name(f"{path.name}.lock").open("rb") as lock:
                while not _is_free(lock.fileno()):
                    if self._clock.monotonic() > end:
                        raise TargetUnavailable(f"no capture after {timeout_s:g} s", subject=path.name)
                    self._clock.sleep(pause)
                    pause = min(2 * pause, _LOOKS_S[1])
        except OSError as error:
            raise self._missing(path, error) from None

    def _checked(self, file: Any, ids: list[int]) -> Tensor:
        kind = self._kind
        if (layers := (file.metadata() or {}).get("layers")) != str(list(kind.layers)):
            fix = "start the engine with eaglefeed's connector, and with these layers"
            raise TargetMismatch("captured other layers", wanted=list(kind.layers), got=layers, fix=fix)
        wanted, got = [len(ids), len(kind.layers), kind.hidden_size], file.get_slice("hidden_states").get_shape()
        if got[1:] != wanted[1:]:
            raise TargetMismatch("captured states of another target", wanted=wanted, got=got)
        if got != wanted or file.get_tensor("token_ids").tolist() != ids:
            fix = "use a newer engine, or start it with --no-enable-prefix-caching --no-enable-chunked-prefill"
            what = "captured other tokens than it was given (prefix caching or chunked prefill shortens captures)"
            raise TargetMismatch(what, wanted=len(ids), got=got[0], fix=fix)
        states: Tensor = file.get_tensor("hidden_states")
        if states.dtype != kind.dtype:
            raise TargetMismatch("captured in another dtype", wanted=kind.dtype, got=states.dtype)
        return states

    def _missing(self, path: Path, error: OSError) -> MissingCapture:
        fix = f"see that the engine writes to {self.path}, that this process may read it, and that it has room"
        return MissingCapture(f"no capture ({error.strerror})", subject=path.name, fix=fix)

    def _delete(self, paths: list[Path]) -> None:
        for path in paths:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                _log.warning("capture_not_deleted", path=str(path), reason=error.strerror)


def _is_free(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _read(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        fix = "see the engine's log: it may have been killed, or its folder may be full"
        raise TargetUnavailable(f"no whole capture ({error})", subject=path.name, fix=fix) from None

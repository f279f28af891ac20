"""A store on a disk that is too small for a run, and a trainer that makes room whenever its producer waits."""

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from os_faults import instead_of, left_over

import pipeline
from eaglefeed.clock import ManualClock
from eaglefeed.queue.base import Lease
from eaglefeed.schema.prompt import Prompt, PromptRow
from eaglefeed.schema.refs import decode_ref
from eaglefeed.storage import files
from eaglefeed.storage.folder import RootFolder
from eaglefeed.storage.shared_dir import SharedDirStore

__all__ = ["MB", "NFS", "SmallRun", "big_prompt", "mounted", "shrink"]

MB, NFS = 2**20, 0x6969


def big_prompt(index: int) -> Prompt:
    """A prompt whose sample takes 1 MB as the echo target makes it: 3,840 tokens of 272 bytes, and the header."""
    row = PromptRow((1 + index % 40, *[2] * 3839), (0, *[1] * 3839))
    return pipeline.prompt(index, rows=(row,), max_length=4096)


def _used(folder: Path) -> int:
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        return sum(_used(Path(each.path)) if each.is_dir() else _size(each) for each in entries)
    return 0


def _size(entry: "os.DirEntry[str]") -> int:
    try:
        return entry.stat().st_size
    except FileNotFoundError:  # a write that has just ended
        return 0


def shrink(monkeypatch: pytest.MonkeyPatch, root: Path, num_bytes: int) -> None:
    """Let the files below a folder take so many bytes together, and no more."""

    def write(real: Callable[..., int], fd: int, data: memoryview, place: int) -> int:
        if _used(root) + max(place + len(data) - os.fstat(fd).st_size, 0) > num_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data, place)

    def told(real: Callable[..., os.statvfs_result], fd: int) -> os.statvfs_result:
        fields = list(real(fd))
        fields[4] = max(num_bytes - _used(root), 0) // fields[1]  # f_bavail, in units of f_frsize
        return os.statvfs_result(fields)

    monkeypatch.setattr(files, "file_system", lambda _fd: NFS)  # which preallocates nothing
    instead_of(monkeypatch, "pwrite", write)
    instead_of(monkeypatch, "statvfs", told)


@contextmanager
def mounted(monkeypatch: pytest.MonkeyPatch, folder: Path, num_bytes: int) -> Iterator[None]:
    """Have a memory file system of that size there, whose room is not looked at before a write."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a small file system")
    monkeypatch.setattr(RootFolder, "_check_room", lambda *_: None)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


class _Waiting(ManualClock):
    def __init__(self) -> None:
        super().__init__()
        self.then: Callable[[], object] = lambda: None

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self.then()


class SmallRun(pipeline.Run):
    """A run in a folder; whenever its producer sleeps, `trained` more samples are trained on and deleted.

    Attributes:
        trained: how many at a time.
        delivered: the ids of those, in order.
        num_waits: how often the producer slept.
        peak_bytes: the most that lay in the store after a put.
        num_puts: how many were tried.
    """

    store: SharedDirStore

    def __init__(self, root: Path) -> None:
        clock = _Waiting()
        super().__init__(clock=clock, store=SharedDirStore(root, durability="none"))
        clock.then = self._wait
        self.trained, self.num_waits, self.num_puts, self.peak_bytes = 3, 0, 0, 0
        self.delivered: list[str] = []
        put = self.store.put

        def watched(*args: object) -> object:
            self.num_puts += 1
            try:
                return put(*args)  # type: ignore[arg-type]
            finally:
                self.peak_bytes = max(self.peak_bytes, sum(shard.num_bytes for shard in self.store.scan()))

        self.store.put = watched  # type: ignore[method-assign,assignment]

    def _wait(self) -> None:
        self.num_waits += 1
        self.check()
        self.train(self.trained)

    def check(self) -> None:
        """A ref for each whole shard, a shard for each ref, nothing else, and no prompt that somebody holds."""
        payloads = [item.payload for item in self.samples.payloads()]
        keys = {next(iter(decode_ref(payload).feature_keys.values())) for payload in payloads}
        shards = {name for name in left_over(self.store) if "/" in name}
        assert shards == keys
        assert self.prompts.stats().leased == 0

    def train(self, count: int) -> None:
        """Read, acknowledge and delete so many samples, if there are."""
        lease = self.samples.lease(count, visibility_timeout_s=60, consumer="trainer")
        if isinstance(lease, Lease):
            for item in lease.items:
                ref = decode_ref(item.payload)
                assert self.store.get(ref)["input_ids"].shape == (1, 3840)
                assert self.samples.ack(lease.token, [item.id]).ok == (item.id,)
                self.store.delete(ref)
                self.samples.forget([item.id])
                self.delivered.append(item.id)

"""The doctor's look at where shards lie: what its file system or bucket can do, for whom, and whether there is room.

Its files have the names of writes in progress, `.tmp-…`, so that a janitor removes what a killed doctor left.
"""

import errno
import os
import re
import stat
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from eaglefeed.clock import SYSTEM_CLOCK, Clock
from eaglefeed.ops.doctor import Finding, Said, fail, look, ok, skipped, warn
from eaglefeed.ops.doctor_bucket import BUCKET_S, ask_bucket
from eaglefeed.ops.wording import human_bytes
from eaglefeed.storage.base import open_store
from eaglefeed.storage.probing import UNSUPPORTED
from eaglefeed.storage.temporaries import temporary_name

__all__ = ["Need", "examine_store"]

SHM = Path("/dev/shm")  # noqa: S108  (what shm:// is)
_MOUNTS = Path("/proc/self/mounts")
_FAN_OUT = re.compile(r"[0-9a-f]{2}")
_LEAST_BYTES, _HIGH_SHARE = 64 * 2**20, 0.8
_LEAST_SHM_BYTES = 64 * 2**20
_SLOW_SYNC_S, _MAX_CLOCK_S = 1.0, 5.0
_LIKE_A_SCHEME, _SHM_NAME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:"), re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK}
_SHARED_FIX = "give all who share it one group and umask 002: chgrp -R GROUP {0} && chmod -R g+rwX {0} && chmod g+s {0}"
_MAKE_FIX = (
    "let its owner make it for you: install -d -m 2775 -o USER -g GROUP {0}; or pass --store with another folder"
)
_SHM_FIX = "raise it: shm_size in docker compose, --shm-size of docker run, an emptyDir of medium Memory"


class Need(NamedTuple):
    """What a run needs of its store.

    Args:
        high_bytes: how much it may hold at once, queue.high_bytes.
        num_bytes: of the samples that are still to be produced; None where nothing was fed yet.
        num_items: how many they are.
        is_kept: trained samples stay (train.retain).
    """

    high_bytes: int
    num_bytes: int | None = None
    num_items: int | None = None
    is_kept: bool = False

    @property
    def at_once(self) -> int:
        """Bytes that it adds at most to what it holds."""
        if self.num_bytes is None:
            return self.high_bytes
        return self.num_bytes if self.is_kept else min(self.num_bytes, self.high_bytes)


def examine_store(uri: str, need: Need, *, clock: Clock = SYSTEM_CLOCK) -> Iterator[Finding]:
    """Look at the store at `uri`, an address as open_store takes it; nothing of it is made or left."""
    scheme, _, rest = uri.partition("://")
    if scheme == "s3":
        yield from look("store.bucket", partial(ask_bucket, uri), BUCKET_S)
    elif scheme == "nccl":
        what = "samples stay with their producers, which bound them by store.peer_bytes"
        yield from look("store.folder", lambda: [skipped(what)])
    elif scheme == "shm" and _SHM_NAME.fullmatch(rest):
        yield from _examine_folder(SHM / "eaglefeed" / rest, need, clock)
    elif rest.startswith("/") if scheme == "file" else uri and not _LIKE_A_SCHEME.match(uri):
        yield from _examine_folder(Path(os.path.expanduser(rest or uri)).absolute(), need, clock)  # noqa: PTH111 - no error
    else:
        yield from look("store.address", partial(_address, uri))
    yield from look("store.shm", _shm)


def _address(uri: str) -> Iterator[Said]:
    open_store(uri).close()
    fix = "use file:///folder, shm://name or s3://bucket/prefix"
    yield fail(f"{uri}: samples in one process's memory, which no other sees", fix)


def _examine_folder(root: Path, need: Need, clock: Clock) -> Iterator[Finding]:
    found = look("store.folder", partial(_folder, root))
    yield from found
    if any(finding.status == "fail" for finding in found):
        return
    place = _nearest(root)
    yield from look("store.write", partial(_write, place, clock))
    yield from look("store.space", partial(_space, place, need))
    yield from look("store.permissions", partial(_permissions, root, place))
    yield from look("store.clock", partial(_clock, place, clock))


def _nearest(root: Path) -> Path:
    """The folder, or the one that it will be made in."""
    return next(folder for folder in (root, *root.parents) if folder.exists())


def _folder(root: Path) -> Iterator[Said]:
    place = _nearest(root)
    info = place.stat()
    if not stat.S_ISDIR(info.st_mode):
        yield fail(f"{place} is no folder", "pass --store with a folder")
        return
    if os.statvfs(place).f_flag & os.ST_RDONLY:
        yield fail(f"{place} is mounted read-only", "mount it for writing where producers and trainers run")
        return
    closed = [folder for folder in (place, *_fan_out(root)) if not os.access(folder, os.R_OK | os.W_OK | os.X_OK)]
    if closed:
        other = closed[0].stat()
        owner = f"owner {other.st_uid}:{other.st_gid}, mode {stat.filemode(other.st_mode)}"
        fix = (_SHARED_FIX if place == root else _MAKE_FIX).format(root)
        more = f", nor {len(closed) - 1} more folders" * (len(closed) > 1)
        yield fail(f"uid {os.geteuid()} may not write to {closed[0]} ({owner}){more}", fix)
        return
    made = "" if place == root else f", to be made in {place}"
    yield ok(f"{root}{made} on {_file_system(place)}, {info.st_uid}:{info.st_gid} {stat.filemode(info.st_mode)}")


def _fan_out(root: Path) -> list[Path]:
    """Its folders of shards."""
    if not root.is_dir() or not os.access(root, os.R_OK | os.X_OK):
        return []
    return [Path(entry.path) for entry in os.scandir(root) if _FAN_OUT.fullmatch(entry.name)]


def _file_system(place: Path) -> str:
    """Its kind, by the mount that lies above it."""
    real = place.resolve()
    try:
        mounts = [line.split()[1:3] for line in _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        return "an unknown file system"
    above = [(len(point), kind) for point, kind in mounts if real.is_relative_to(point)]
    kind = max(above, default=(0, "an unknown file system"), key=lambda mount: mount[0])[1]
    return f"{kind} (of this container alone, and gone with it)" if kind == "overlay" else kind


@contextmanager
def _probe_file(place: Path) -> Iterator[tuple[int, Path]]:
    """A new file and its handle; it is gone afterwards."""
    path = place / temporary_name()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        yield fd, path
    finally:
        os.close(fd)
        path.unlink(missing_ok=True)


def _write(place: Path, clock: Clock) -> Iterator[Said]:
    linked, moved = place / temporary_name(), place / temporary_name()
    with _probe_file(place) as (fd, path):
        try:
            os.write(fd, bytes(4096))
            sync_s = _synced(fd, clock)
            yield from _links(path, linked)
            if linked.exists():
                linked.rename(moved)
            folder_s = yield from _synced_folder(place, clock)
        finally:
            linked.unlink(missing_ok=True)
            moved.unlink(missing_ok=True)
    what = f"a write, a link and a rename work; fsync takes {sync_s * 1000:.1f} ms, of the folder {folder_s * 1000:.1f}"
    if max(sync_s, folder_s) > _SLOW_SYNC_S:
        yield warn(what, "use a faster disk, or store.durability=none: a power cut then costs samples, not the run")
    else:
        yield ok(what)


def _links(path: Path, linked: Path) -> Iterator[Said]:
    fix = "use a file system with hard links (ext4, xfs, NFS, Lustre), or s3://"
    try:
        os.link(path, linked)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        yield fail(f"no hard links ({error.strerror}): shards are published by one, which never replaces another", fix)
        return
    with suppress(FileExistsError):
        os.link(path, linked)
        yield fail("a hard link replaced another file", fix)


def _synced(fd: int, clock: Clock) -> float:
    started_s = clock.monotonic()
    os.fsync(fd)
    return clock.monotonic() - started_s


def _synced_folder(place: Path, clock: Clock) -> Generator[Said, None, float]:
    fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return _synced(fd, clock)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        what = f"folders cannot be synced ({error.strerror}): a crash of the machine may cost the names of new shards"
        yield warn(what, "use another file system, if samples are dear; what is lost is found, and can be fed again")
        return 0.0
    finally:
        os.close(fd)


def _space(place: Path, need: Need) -> Iterator[Said]:
    info = os.statvfs(place)
    free, total = info.f_bavail * info.f_frsize, info.f_blocks * info.f_frsize
    most = human_bytes(need.at_once)
    takes = f"holds at most {most} at once"
    if need.num_bytes is not None:
        takes = f"adds at most {most} at once, of {human_bytes(need.num_bytes)} that are still to be produced"
    what = f"{human_bytes(free)} of {human_bytes(total)} free; the run {takes}"
    more = _SHM_FIX if place.is_relative_to(SHM) else "free space, or pass --store with a larger disk"
    if free < min(_LEAST_BYTES, need.at_once):
        yield fail(what, more)
    elif need.is_kept and free < need.at_once:
        yield fail(f"{what}, and train.retain keeps them", more)
    elif _HIGH_SHARE * free < need.at_once:
        yield warn(f"{what}: producers will wait for trainers at {_HIGH_SHARE:.0%} of what is free", more)
    else:
        yield ok(what)
    yield from _inodes(info, need)


def _inodes(info: os.statvfs_result, need: Need) -> Iterator[Said]:
    if info.f_files and need.num_items is not None and info.f_favail < need.num_items:
        fix = "make the file system with more inodes, or feed with a larger feed.batch_size: a sample is a file"
        yield warn(f"{info.f_favail} inodes free for {need.num_items} samples", fix)


def _permissions(root: Path, place: Path) -> Iterator[Said]:
    with _probe_file(place) as (fd, _):
        made = os.fstat(fd)
    umask = os.umask(0o077)
    os.umask(umask)
    me, others = os.geteuid(), {folder.stat().st_uid for folder in (place, *_fan_out(root))}
    others.discard(me)
    for_group = not umask & 0o020
    who = "its group may delete them" if for_group else "this user alone may delete them"
    folders = stat.filemode(stat.S_IFDIR | 0o777 & ~umask)
    file = f"{made.st_uid}:{made.st_gid} {stat.filemode(made.st_mode)}"
    what = f"files made here are {file}, folders {folders}: {who}"
    if made.st_uid != me:
        fix = "let the server map users as they are (no root_squash for who runs this), or run as a user it knows"
        yield warn(f"{what}; uid {me} made them, the server says uid {made.st_uid}", fix)
    elif others and place == root and not (for_group and place.stat().st_mode & stat.S_ISGID):
        yield warn(f"{what}; uid {', '.join(map(str, sorted(others)))} too writes here", _SHARED_FIX.format(root))
    else:
        yield ok(what)


def _clock(place: Path, clock: Clock) -> Iterator[Said]:
    with _probe_file(place) as (fd, _):
        os.write(fd, b"x")
        ahead_s = os.fstat(fd).st_mtime - clock.time()
    what = f"the file system's clock is {abs(ahead_s):.2f} s {'ahead of' if ahead_s > 0 else 'behind'} this machine's"
    if abs(ahead_s) > _MAX_CLOCK_S:
        yield warn(f"{what}: a janitor misjudges how old leftovers are", "run NTP here and on the file server")
    else:
        yield ok(what)


def _shm() -> Iterator[Said]:
    if not SHM.is_dir():
        yield skipped(f"there is no {SHM}")
        return
    info = os.statvfs(SHM)
    total = info.f_blocks * info.f_frsize
    what = f"{SHM} has {human_bytes(total)}"
    if total <= _LEAST_SHM_BYTES:
        yield warn(
            f"{what}: too little for shm://, for NCCL between GPUs of a host, and for loaders' workers", _SHM_FIX
        )
    else:
        yield ok(what)

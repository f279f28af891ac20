"""File systems that lack something: told before the first prompt is leased, or done without."""

import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from os_faults import calls_of, fail_call, instead_of, left_over
from structlog.testing import capture_logs

import pipeline
import samples
from eaglefeed.consumer.run import only_trainer_of
from eaglefeed.errors import ConfigError, StorageError
from eaglefeed.queue import EmbeddedServer
from eaglefeed.storage import files
from eaglefeed.storage.base import key_of
from eaglefeed.storage.folder import RootFolder
from eaglefeed.storage.shared_dir import SharedDirStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SharedDirStore]:
    opened = SharedDirStore(tmp_path / "store")
    yield opened
    opened.close()


def _run(store: SharedDirStore) -> pipeline.Run:
    run = pipeline.Run(store=store)
    run.feed(*(pipeline.prompt(index) for index in range(3)))
    return run


LACKS = [
    *(("link", code, "no hard links") for code in (errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP, errno.EINVAL)),
    *(("link", code, "no hard links") for code in (errno.EXDEV, errno.EMLINK)),
    *(("fsync", code, "store.durability=none") for code in (errno.ENOSYS, errno.EINVAL)),
    ("open", errno.EROFS, "cannot write"),
    ("open", errno.EACCES, f"uid {os.geteuid()} cannot write"),
    ("unlink", errno.EPERM, "cannot be deleted"),
]


@pytest.mark.parametrize(("call", "code", "said"), LACKS)
def test_what_no_wait_will_mend_ends_a_producer_before_it_leases_a_prompt(
    store: SharedDirStore, monkeypatch: pytest.MonkeyPatch, call: str, code: int, said: str
) -> None:
    run = _run(store)
    fail_call(monkeypatch, call, code)
    with pytest.raises(ConfigError, match=said) as caught:
        run.produce()
    monkeypatch.undo()
    assert str(store.root) in str(caught.value)
    assert os.strerror(code) in str(caught.value)
    stats = run.prompts.stats()
    assert (stats.ready, stats.leased, stats.redelivered) == (3, 0, 0)
    assert [name for name in left_over(store) if not (call == "unlink" and name.startswith(".tmp-"))] == []


@pytest.mark.parametrize("call", ["link", "fsync", "pwrite"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE])
def test_what_may_pass_is_not_taken_for_something_that_is_not_there(
    store: SharedDirStore, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    run = _run(store)
    fail_call(monkeypatch, call, code)
    with capture_logs() as logs:
        assert run.produce().produced == 3
    assert [entry["reason"] for entry in logs if entry["event"] == "store_not_probed"] == [os.strerror(code)]


def test_neither_renaming_nor_changing_modes_is_needed(store: SharedDirStore, monkeypatch: pytest.MonkeyPatch) -> None:
    used = calls_of(monkeypatch, "rename", "replace", "chmod", "fchmod", "utime", "symlink", "chown", "fchown")
    run = _run(store)
    assert run.produce().produced == 3
    assert used == []


def test_a_probe_leaves_nothing_and_syncs_what_the_policy_says(
    store: SharedDirStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = calls_of(monkeypatch, "fsync", "link")
    store.probe()
    assert seen == ["fsync", "link"]
    assert left_over(store) == []


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
def test_folders_that_cannot_be_synced_are_told_once_and_shards_are_kept(
    store: SharedDirStore, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def sync(real: Callable[[int], None], fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):  # noqa: PTH112
            raise OSError(code, os.strerror(code))
        real(fd)

    instead_of(monkeypatch, "fsync", sync)
    with capture_logs() as logs:
        for token in (7, 8):
            store.get(store.put(samples.ref(token=token), samples.tensors()))
    assert [entry["event"] for entry in logs] == ["folders_not_synced"]


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS])
def test_room_that_cannot_be_reserved_is_written_without(
    store: SharedDirStore, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(files, "file_system", lambda _fd: 0xEF53)
    fail_call(monkeypatch, "posix_fallocate", code)
    store.get(store.put(samples.ref(), samples.tensors()))


def test_ids_that_differ_in_case_alone_keep_their_own_shards_where_names_do_not(
    store: SharedDirStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eaglefeed.storage.base.shard_key", lambda sample_id, token: f"00/{sample_id}.{token}")

    def link(real: Callable[..., None], made: str, name: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        if name.lower() in [each.lower() for each in os.listdir(dst_dir_fd)]:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        real(made, name, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    instead_of(monkeypatch, "link", link)

    def ref(sample_id: str, token: int, seed: int) -> tuple[object, object]:
        features = samples.tensors(seed=seed)
        key = f"00/{sample_id}.{token}.safetensors"
        return samples.ref(features, sample_id=sample_id, feature_keys=dict.fromkeys(features, key)), features

    first = store.put(*ref("Row-A", 7, 1))  # type: ignore[arg-type]
    with pytest.raises(StorageError, match="never replaced") as caught:
        store.put(*ref("row-a", 7, 2))  # type: ignore[arg-type]
    assert caught.value.retryable  # the next lease has another token, and so another name
    second = store.put(*ref("row-a", 8, 2))  # type: ignore[arg-type]
    assert {key_of(first), key_of(second)} == {found.key for found in store.scan()}
    assert store.get(first)["input_ids"].tolist() == samples.tensors(seed=1)["input_ids"].tolist()
    assert store.get(second)["input_ids"].tolist() == samples.tensors(seed=2)["input_ids"].tolist()


# locks


@pytest.fixture(params=[errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def no_locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    code = request.param

    def flock(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    return os.strerror(code)


def test_a_trainer_says_where_its_checkpoints_cannot_be_guarded(tmp_path: Path, no_locks: str) -> None:
    with pytest.raises(ConfigError, match=f"{no_locks}; pass --output"), only_trainer_of(tmp_path / "draft"):
        pass


def test_a_lock_that_fails_otherwise_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(StorageError, match=os.strerror(errno.EIO)), only_trainer_of(tmp_path / "draft"):
        pass


def test_a_local_server_says_that_it_needs_locks(tmp_path: Path, no_locks: str) -> None:
    server = EmbeddedServer(tmp_path / "queue")
    with pytest.raises(ConfigError, match=rf"{no_locks}; put run.dir on a local disk"):
        server.start()


def test_stores_read_and_write_without_locks(store: SharedDirStore, no_locks: str) -> None:
    assert no_locks
    assert _run(store).produce().produced == 3
    assert all(store.read_ref(found.key) for found in store.scan())


def test_a_folder_that_a_file_system_cannot_open_for_others_is_named(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can become another user")
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    for above in (tmp_path, *list(tmp_path.parents)[:2]):
        above.chmod(above.stat().st_mode | 0o055)
    os.seteuid(65534)
    try:
        with pytest.raises(ConfigError, match=rf"Permission denied \({closed} is of 0:0, mode 0700\) for uid 65534"):
            RootFolder(closed, "none")
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("name", ["contract.json", "target_assets.safetensors"])
def test_a_file_of_the_run_that_may_not_be_read_costs_no_prompt(tmp_path: Path, name: str) -> None:
    if os.geteuid():
        pytest.skip("only root can become another user")
    run = _run(SharedDirStore(tmp_path / "store"))
    run.produce()
    path = run.store.root / name  # type: ignore[attr-defined]
    path.chmod(0o600)
    os.seteuid(65534)
    try:
        with pytest.raises(ConfigError, match=rf"cannot be opened as uid 65534.*{path} is of 0:0, mode 0600"):
            (run.store.get_document if name.endswith("json") else run.store.get_assets)(name)
    finally:
        os.seteuid(0)


def test_a_producer_that_may_not_write_says_so_at_once(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can become another user")
    root = tmp_path / "store"
    store = SharedDirStore(root)
    root.chmod(0o755)
    run = _run(store)
    os.seteuid(65534)
    try:
        with pytest.raises(ConfigError, match=r"uid 65534 cannot write, got Permission denied.*umask 002"):
            run.worker().run(threading.Event())
    finally:
        os.seteuid(0)
    assert run.prompts.stats().ready == 3

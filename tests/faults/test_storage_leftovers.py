"""What a crash leaves of a write is swept up, and nothing else is."""

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog.testing
from os_faults import fail_call, instead_of, left_over

import samples
from eaglefeed.clock import ManualClock
from eaglefeed.storage.header import parse_header, ref_of
from eaglefeed.storage.shared_dir import SharedDirStore
from eaglefeed.storage.temporaries import temporary_name


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SharedDirStore]:
    opened = SharedDirStore(tmp_path / "store")
    yield opened
    opened.close()


_WRITERS = """
import os, random, signal, sys, time
sys.path.insert(0, sys.argv[2])
import torch
import samples
from eaglefeed.storage import shard
from eaglefeed.storage.shared_dir import SharedDirStore
torch.set_num_threads(1)
shard.CHUNK_BYTES = 4096
features = samples.tensors(length=2000)
dice = random.Random(5)
for number in range(60):
    child = os.fork()
    if not child:
        store = SharedDirStore(sys.argv[1], durability="none")
        for token in range(number * 10**6, (number + 1) * 10**6):
            store.put(samples.ref(features, token=token, num_tokens=4000), features)
    time.sleep(dice.uniform(0.001, 0.02))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


def test_writers_killed_at_any_moment_leave_whole_shards_and_what_a_sweep_removes(tmp_path: Path) -> None:
    root = tmp_path / "store"
    command = [sys.executable, "-c", _WRITERS, str(root), str(Path(__file__).parents[1])]
    subprocess.run(command, check=True, timeout=100)
    store = SharedDirStore(root)
    shards = list(store.scan())
    assert len(shards) > 10
    for found in shards:
        path = root / found.key
        store.get(ref_of(parse_header(path.read_bytes(), path.stat().st_size, path.name), store.uri, path.name))
    leftovers = [name for name in left_over(store) if not name.endswith(".safetensors")]
    assert len(leftovers) > 5
    assert all(Path(name).name.startswith(".tmp-") for name in leftovers)
    assert store.sweep(older_than_s=10**6) == (len(leftovers), 0)
    assert left_over(store) == sorted(found.key for found in shards)
    assert store.sweep(older_than_s=0) == (0, 0)
    store.close()


_SWEEP = """
import sys
from eaglefeed.storage.shared_dir import SharedDirStore
print(*SharedDirStore(sys.argv[1]).sweep(older_than_s=0))
assert "torch" not in sys.modules
"""


def test_no_sweep_removes_what_a_live_process_writes(store: SharedDirStore, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def wait(real: Callable[..., int], *args: object) -> int:
        reached.set()
        assert go_on.wait(60)
        return real(*args)

    instead_of(monkeypatch, "pwrite", wait)
    features = samples.tensors()
    refs: list[object] = []
    writer = threading.Thread(target=lambda: refs.append(store.put(samples.ref(features), features)))
    writer.start()
    assert reached.wait(60)
    (made,) = left_over(store)
    assert store.sweep(older_than_s=0) == (0, 0)
    other = subprocess.run([sys.executable, "-c", _SWEEP, str(store.root)], check=True, capture_output=True, timeout=60)
    assert other.stdout == b"0 0\n"
    assert left_over(store) == [made]
    go_on.set()
    writer.join(60)
    assert store.get(refs[0])  # type: ignore[arg-type]


def _time_of(folder: Path) -> float:
    (folder / "now").touch()
    return (folder / "now").stat().st_mtime


@pytest.mark.parametrize("ahead_s", [0, 7200, -7200])
def test_a_leftover_is_told_by_who_made_it_or_by_its_age(tmp_path: Path, ahead_s: float) -> None:
    now_s = _time_of(tmp_path)
    # This machine's clock is far off: what is old by it may be young, as whoever dates the files knows.
    store = SharedDirStore(tmp_path / "store", clock=ManualClock(now_s + ahead_s))
    mine = temporary_name()
    start, pid, host = (mine.rsplit("-", 3)[place] for place in (2, 1, 0))
    dead = subprocess.Popen(["true"])
    dead.wait()
    names = {
        mine: False,  # alive, whatever its age
        f"{host}-{pid}-{int(start) + 1}-00000000": True,  # its process id has been used again
        f"{host}-{dead.pid}-{start}-00000000": True,
        f"{host}x-{pid}-{start}-00000000": False,  # another host's, young
        f"{host}y-{pid}-{start}-00000000": True,  # another host's, old
        ".tmp-strange": True,
        "contract.json": False,
    }
    for folder_name in (".", "00"):
        (store.root / folder_name).mkdir(exist_ok=True)
        for name in names:
            path = store.root / folder_name / name
            path.write_bytes(b"x")
            age_s = 50 if name.startswith(f"{host}x") else 5000
            os.utime(path, (now_s - age_s,) * 2)
    assert store.sweep(older_than_s=600) == (2 * sum(names.values()), 0)
    kept = sorted(name for name, removed in names.items() if not removed)
    assert left_over(store) == sorted([*kept, *(f"00/{name}" for name in kept)])
    store.close()


def test_where_no_file_can_be_made_leftovers_are_told_by_this_machines_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SharedDirStore(tmp_path / "store", clock=ManualClock(_time_of(tmp_path) + 5000))
    (store.root / ".tmp-strange").touch()
    fail_call(monkeypatch, "utime", errno.EROFS)
    assert store.sweep(older_than_s=600, dry_run=True) == (1, 0)
    store.close()


def test_a_leftover_that_cannot_be_removed_is_told_and_the_others_go(store: SharedDirStore) -> None:
    for folder_name in (".", "00"):
        (store.root / folder_name).mkdir(exist_ok=True)
        (store.root / folder_name / ".tmp-a").mkdir()  # unlink fails
        (store.root / folder_name / ".tmp-b").write_bytes(b"x")
        for name in (".tmp-a", ".tmp-b"):
            os.utime(store.root / folder_name / name, (1, 1))
    with structlog.testing.capture_logs() as logs:
        assert store.sweep(older_than_s=60) == (2, 2)
    assert [entry["event"] for entry in logs] == ["temporary_stays"] * 2
    assert not list(store.root.rglob(".tmp-b"))


def test_a_dead_process_that_nobody_waited_for_is_dead(store: SharedDirStore) -> None:
    script = (
        "import sys, pathlib as p, eaglefeed.storage.temporaries as t; p.Path(sys.argv[1], t.temporary_name()).touch()"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(store.root)]) as maker:
        os.waitid(os.P_PID, maker.pid, os.WEXITED | os.WNOWAIT)
        assert len(left_over(store)) == 1
        assert store.sweep(older_than_s=10**6) == (1, 0)
    assert maker.returncode == 0

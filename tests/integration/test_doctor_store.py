"""The doctor's look at stores: each way in which one cannot be used is found, and nothing stays there."""

import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import s3_server
from doctors import left_in, worst
from eaglefeed.clock import ManualClock
from eaglefeed.errors import StorageError
from eaglefeed.ops import doctor_store
from eaglefeed.ops.doctor import Finding
from eaglefeed.ops.doctor_store import Need, examine_store
from eaglefeed.storage.object_store import ObjectStore

GIB = 2**30


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users can reach, unlike the tests' own."""
    with tempfile.TemporaryDirectory(prefix="eaglefeed-test-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def findings_of(folder: Path | str, need: Need | None = None, **options: object) -> list[Finding]:
    return list(examine_store(str(folder), need or Need(high_bytes=2**20), **options))  # type: ignore[arg-type]


def test_a_store_that_is_to_be_made_is_tried_where_it_will_lie_and_not_made(tmp_path: Path) -> None:
    findings = findings_of(tmp_path / "a" / "b")
    assert {each.status for each in findings} == {"ok"}
    assert f"to be made in {tmp_path}" in worst(findings, "store.folder").what
    assert left_in(tmp_path) == []


def test_a_store_that_is_a_file_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert worst(findings_of(tmp_path / "file"), "store.folder").status == "fail"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make other users' folders")
def test_a_folder_of_shards_of_another_user_fails_and_says_whose_it_is(open_folder: Path) -> None:
    root = open_folder / "store"
    (root / "3f").mkdir(parents=True)
    root.chmod(0o777)
    (root / "3f").chmod(0o755)
    findings = json.loads(as_user(65534, f"[vars(f) for f in examine_store({str(root)!r}, Need(2**20))]"))
    assert findings[0]["check"] == "store.folder"
    assert findings[0]["status"] == "fail"
    assert f"may not write to {root}/3f (owner 0:0" in findings[0]["what"]
    assert "umask 002" in findings[0]["fix"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make other users' folders")
def test_a_store_that_this_user_cannot_make_is_made_by_somebody_else_and_nothing_above_it_changed(
    open_folder: Path,
) -> None:
    store = open_folder / "store"
    (finding,) = json.loads(as_user(65534, f"[vars(f) for f in examine_store({str(store)!r}, Need(2**20))][:1]"))
    assert (finding["check"], finding["status"]) == ("store.folder", "fail")
    command = finding["fix"].partition(": ")[2].partition(";")[0]
    subprocess.run(command.replace("USER", "65534").replace("GROUP", "65534").split(), check=True)
    found = json.loads(as_user(65534, f"[vars(f) for f in examine_store({str(store)!r}, Need(2**20))]"))
    assert {each["status"] for each in found if each["check"] != "store.shm"} == {"ok"}
    assert open_folder.stat().st_uid == 0


def as_user(uid: int, expression: str) -> str:
    """What an expression gives in a process of another user, as JSON."""
    source = Path(__file__).parents[2] / "src"
    code = (
        "import json, sys\n"
        f"sys.path.insert(0, {str(source)!r})\n"
        "from eaglefeed.ops.doctor_store import Need, examine_store\n"
        "import os\n"
        "from eaglefeed.queue import checks\n"
        f"os.setgid({uid}); os.setuid({uid})\n"
        f"print(json.dumps({expression}))"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make other users' folders")
@pytest.mark.parametrize(("umask", "mode", "status"), [(0o022, 0o755, "warn"), (0o002, 0o2775, "ok")])
def test_files_that_the_other_users_of_a_store_could_not_delete_are_warned_of(
    tmp_path: Path, umask: int, mode: int, status: str
) -> None:
    root = tmp_path / "store"
    root.mkdir()
    root.chmod(mode)
    os.chown(root, 65534, 65534)
    root.chmod(mode)
    before = os.umask(umask)
    try:
        finding = worst(findings_of(root), "store.permissions")
    finally:
        os.umask(before)
    assert finding.status == status, finding
    assert ("umask 002" in finding.fix) == (status == "warn")


def mounted(folder: Path, options: str) -> bool:
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    return subprocess.run(command, capture_output=True, timeout=20, check=False).returncode == 0


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    folder = tmp_path / "mounted"

    def at(options: str) -> Path:
        if not mounted(folder, options):
            pytest.skip("this user may not mount")
        return folder

    yield at
    subprocess.run(["umount", str(folder)], capture_output=True, timeout=20)


def test_a_read_only_mount_fails(mount: Callable[[str], Path]) -> None:
    findings = findings_of(mount("size=1m,ro"))
    assert worst(findings, "store.folder").status == "fail"
    assert "mounted read-only" in findings[0].what


def test_a_store_that_is_too_small_for_the_run_is_told_and_how_it_will_go(mount: Callable[[str], Path]) -> None:
    folder = mount("size=128m")
    assert worst(findings_of(folder, Need(32 * 2**20)), "store.space").status == "ok"
    waits = worst(findings_of(folder, Need(GIB, num_bytes=10 * GIB)), "store.space")
    assert waits.status == "warn"
    assert "at most 1.0 GiB at once, of 10.0 GiB that are still to be produced: producers will wait" in waits.what
    kept = Need(64 * 2**20, num_bytes=10 * GIB, is_kept=True)
    assert worst(findings_of(folder, kept), "store.space").status == "fail", "nothing of it would ever go"
    (folder / "full").write_bytes(bytes(100 * 2**20))
    assert worst(findings_of(folder, Need(GIB)), "store.space").status == "fail"


def test_too_few_inodes_are_told(mount: Callable[[str], Path]) -> None:
    finding = worst(findings_of(mount("size=128m,nr_inodes=100"), Need(2**20, 2**20, 1000)), "store.space")
    assert finding.status == "warn"
    assert "inodes free for 1000 samples" in finding.what


def test_the_memory_that_a_container_has_by_default_is_told_to_be_too_little(
    mount: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_store, "SHM", mount("size=64m"))
    findings = findings_of("shm://run", Need(GIB))
    assert [worst(findings, f"store.{name}").status for name in ("shm", "space")] == ["warn", "warn"]
    assert all("shm_size" in worst(findings, f"store.{name}").fix for name in ("shm", "space"))


def test_a_clock_that_is_not_the_file_systems_is_told(tmp_path: Path) -> None:
    findings = findings_of(tmp_path, clock=ManualClock(1000.0))
    assert worst(findings, "store.clock").status == "warn"


def test_a_file_system_without_hard_links_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    finding = worst(findings_of(tmp_path), "store.write")
    assert finding.status == "fail"
    assert "no hard links" in finding.what
    assert left_in(tmp_path) == []


def test_a_file_system_that_syncs_no_folders_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def refuse(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(22, "Invalid argument")
        real(fd)

    monkeypatch.setattr(os, "fsync", refuse)
    finding = worst(findings_of(tmp_path), "store.write")
    assert finding.status == "warn"
    assert "folders cannot be synced" in finding.what
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("uri", ["mem://x", "foo:bar", "ftp://x/y", "shm://../x", "file://relative"])
def test_an_address_that_is_no_store_for_several_processes_fails(uri: str) -> None:
    finding = worst(findings_of(uri), "store.address")
    assert finding.status == "fail"
    assert finding.fix or "wanted" in finding.what


def test_a_bucket_is_tried_and_left_as_it_was(s3: s3_server.S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    s3_server.use(monkeypatch, s3.address)
    bucket = s3.new_bucket()
    finding = worst(findings_of(f"s3://{bucket}/run"), "store.bucket")
    assert finding.status == "ok", finding
    assert s3.keys(bucket) == []
    missing = worst(findings_of("s3://no-such-bucket/run"), "store.bucket")
    assert missing.status == "fail"
    assert "no such bucket" in missing.what


@pytest.mark.parametrize("kind", ["put", "get", "list", "delete"])
def test_each_right_that_a_bucket_refuses_is_told(
    s3: s3_server.S3Server, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    with s3_server.proxied(s3) as proxy:
        s3_server.use(monkeypatch, proxy.address)
        proxy.plan = lambda request: s3_server.Fault.DENIED if request.kind == kind else None
        bucket = s3.new_bucket()
        finding = worst(findings_of(f"s3://{bucket}/run"), "store.bucket")
    assert finding.status == "fail"
    assert "access is denied" in finding.what
    assert kind == "delete" or s3.keys(bucket) == []
    assert "s3:PutObject" in finding.fix or "PutObject" in finding.fix


def test_an_object_whose_write_was_not_answered_is_removed(
    s3: s3_server.S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, put = s3.new_bucket(), ObjectStore.put_document

    def unanswered(store: ObjectStore, name: str, data: bytes) -> bool:
        put(store, name, data)
        raise StorageError("no answer", subject=name)

    monkeypatch.setattr(ObjectStore, "put_document", unanswered)
    s3_server.use(monkeypatch, s3.address)
    finding = worst(findings_of(f"s3://{bucket}/run"), "store.bucket")
    assert "no answer" in finding.what
    assert s3.keys(bucket) == []

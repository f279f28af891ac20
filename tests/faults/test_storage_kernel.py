"""Faults that the kernel itself makes: another user's file, and system calls that strace fails."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import samples
from eaglefeed.schema.refs import encode_ref
from eaglefeed.storage.base import key_of
from eaglefeed.storage.shared_dir import SharedDirStore

_READ_AS_NOBODY = """
import os, sys
sys.path.insert(0, sys.argv[2])
import samples
from eaglefeed.errors import StorageError
from eaglefeed.schema.refs import decode_ref
from eaglefeed.storage.shared_dir import SharedDirStore
ref = decode_ref(bytes.fromhex(sys.argv[3]))
store = SharedDirStore(sys.argv[1])
store.get(ref)
os.chmod(os.path.join(sys.argv[1], next(iter(ref.feature_keys.values()))), 0o600)
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)  # and with it every capability
try:
    store.get(ref)
except StorageError as error:
    print(type(error).__name__, error.retryable, error)
"""


def test_a_shard_that_another_user_keeps_to_himself_says_who_could_not_open_it(
    tmp_path: Path,
) -> None:
    if os.getuid():
        pytest.skip("only root can become another user")
    store = SharedDirStore(tmp_path / "store")
    ref = store.put(samples.ref(), samples.tensors())
    store.close()
    command = [sys.executable, "-c", _READ_AS_NOBODY, str(store.root), str(Path(__file__).parents[1])]
    ended = subprocess.run([*command, encode_ref(ref).hex()], check=True, capture_output=True, text=True, timeout=60)
    path = store.root / key_of(ref)
    assert ended.stdout.startswith(f"SampleDenied False a-1: {path} cannot be opened as uid 65534, ")
    assert f"Permission denied ({path} is of 0:0, mode 0600)" in ended.stdout


_TRACED = """
import sys
sys.path.insert(0, sys.argv[2])
import samples
from eaglefeed.errors import StorageError
from eaglefeed.storage import shard
from eaglefeed.storage.shared_dir import SharedDirStore
shard.CHUNK_BYTES = 64
store = SharedDirStore(sys.argv[1], durability="data")
features = samples.tensors()

def attempt(call, *args):
    try:
        found = call(*args)
        print("ok")
        return found
    except StorageError as error:
        print(type(error).__name__, error.got or error)

for token in range(4):
    ref = attempt(store.put, samples.ref(features, token=token), features)
attempt(store.get, ref)
attempt(store.get, ref)
"""


def test_the_same_faults_out_of_the_kernel(tmp_path: Path) -> None:
    injected = {
        "pwrite64": "error=ENOSPC:when=2",
        "fdatasync": "error=EIO:when=1",
        "linkat": "error=EXDEV:when=1",
        "preadv,preadv2": "error=EIO:when=1",
    }
    strace = shutil.which("strace")
    probe = [strace or "strace", "-f", "-o", "/dev/null", "-e", "inject=fsync:error=EIO", "true"]
    if strace is None or subprocess.run(probe, check=False, capture_output=True).returncode:
        pytest.skip("no strace, or it may trace nothing here")
    inject = [word for name, what in injected.items() for word in ("-e", f"inject={name}:{what}")]
    trace = ["-f", "--seccomp-bpf", "-o", "/dev/null", "-e", f"trace={','.join(injected)}", *inject]
    root = tmp_path / "store"
    script = [sys.executable, "-c", _TRACED, str(root), str(Path(__file__).parents[1])]
    ended = subprocess.run([strace, *trace, *script], check=True, capture_output=True, text=True, timeout=100)
    lines = ended.stdout.splitlines()
    assert lines[0].startswith("StoreFull")
    assert "No space left on device" in lines[0]
    assert lines[1:] == [
        "StorageError Input/output error",
        "StorageError Invalid cross-device link",
        "ok",
        "StorageError Input/output error",
        "ok",
    ]
    assert len([path for path in root.rglob("*") if path.is_file()]) == 1

"""Stores that fail under a janitor, what crashed writes left, and a janitor in a producer."""

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from eaglefeed.cli.store import _tell
from eaglefeed.errors import StorageError
from eaglefeed.producer.ledger import register
from eaglefeed.storage.janitor import Janitor
from janitor_house import THREE, House


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


# stores


def test_a_shard_that_the_disk_does_not_delete_is_counted_and_goes_the_next_time(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(house.store, house.run.samples, "run")
    for token in range(3):
        house.write(f"p-{token}", token)
    plain = os.unlink

    def unlink(name: str, **options: Any) -> None:
        if name.startswith("p-1."):
            raise OSError(errno.EIO, "Input/output error")
        plain(name, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", unlink)
        found = house.later().gc()
    assert (found.orphans, found.failed) == (2, 1)
    assert house.gc().orphans == 1


def test_a_folder_that_cannot_be_listed_ends_the_pass_with_the_stores_error_and_deletes_no_more(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(house.store, house.run.samples, "run")
    house.write("p-1", 1)
    plain = os.listdir

    def listdir(folder: Any) -> list[str]:
        found = plain(folder)
        if any(name.startswith("p-1.") for name in found):
            raise OSError(errno.ESTALE, "Stale file handle")
        return found

    house.later()
    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", listdir)
        with pytest.raises(StorageError):
            house.gc()
    assert house.gc().orphans == 1


def test_what_a_crashed_write_left_is_swept(house: House, tmp_path: Path) -> None:
    register(house.store, house.run.samples, "run")
    (tmp_path / "3f").mkdir()
    left = tmp_path / "3f" / ".tmp-elsewhere-1-2-0123abcd"
    left.write_bytes(b"half")
    now_s = left.stat().st_mtime
    os.utime(left, (now_s - 600,) * 2)
    assert house.gc().temporaries == 0, "its writer on another host may be slow"
    os.utime(left, (now_s - 3700,) * 2)
    assert house.gc().temporaries == 1
    assert not left.exists()


def test_a_temporary_that_cannot_be_deleted_is_counted_and_the_others_go(house: House, tmp_path: Path) -> None:
    register(house.store, house.run.samples, "run")
    (tmp_path / ".tmp-stuck").mkdir()  # unlink fails
    (tmp_path / ".tmp-left").write_bytes(b"half")
    for name in (".tmp-stuck", ".tmp-left"):
        os.utime(tmp_path / name, (1, 1))
    found = house.gc()
    assert (found.temporaries, found.temporaries_left) == (1, 1)
    assert "1 temporaries (1 more could not be deleted)" in _tell(found, house.store.uri, dry_run=False)[-1]


# now and then, in a producer


def test_a_producer_collects_between_its_rounds(house: House) -> None:
    house.begin(*THREE)
    house.run.target.before = lambda _: house.clock.advance(20)
    janitor = Janitor(house.store, house.ledger, interval_s=20, clock=house.clock, jitter=lambda: 0.5)
    house.run.prompts.close()
    house.later()
    worker = house.run.worker(tidy=janitor.maybe_run)
    assert worker.run(threading.Event()).produced == 3
    assert house.keys == house.open_keys
    assert len(house.keys) == 3

"""What all feeds of a run agree on, and how a file may change between them."""

import os
import threading
from pathlib import Path

import pytest

import pipeline
from eaglefeed.errors import ContractMismatch, SchemaError
from eaglefeed.producer.feed_record import FeedRecord, agree_on_feed, agree_on_file
from eaglefeed.queue.base import LeaseQueue
from eaglefeed.schema.contract import CONTRACT_RECORD
from queue_servers import Bench, memory_bench

RECORD = FeedRecord(tokenizer_fingerprint="t", template_fingerprint="p", max_length=16, batch_size=1, packing=False)
CHANGES = [
    ("tokenizer_fingerprint", "u"),
    ("template_fingerprint", "q"),
    ("max_length", 17),
    ("batch_size", 2),
    ("packing", True),
]


@pytest.fixture
def samples() -> LeaseQueue:
    return memory_bench().queue("samples")


@pytest.mark.parametrize(("field", "value"), CHANGES)
def test_a_feed_that_differs_in_one_field_is_refused_by_its_name(bench: Bench, field: str, value: object) -> None:
    queue = bench.queue("samples")
    for _ in range(2):
        agree_on_feed(queue, "1", RECORD)
    other = RECORD.model_copy(update={field: value})
    with pytest.raises(ContractMismatch, match=f"wanted {field}={getattr(RECORD, field)}, got {field}={value};"):
        agree_on_feed(queue, "1", other)
    agree_on_feed(queue, "2", other)  # the queue was purged


@pytest.mark.parametrize(("field", "value"), CHANGES[:3])
def test_a_feed_that_the_runs_contract_does_not_fit_is_refused_before_its_producers_are(
    samples: LeaseQueue, field: str, value: object
) -> None:
    samples.agree(CONTRACT_RECORD, pipeline.contract(**{"max_length": 16, field: value}).to_json())
    with pytest.raises(ContractMismatch, match=f"wanted {field}={value}, got {field}={getattr(RECORD, field)};"):
        agree_on_feed(samples, "1", RECORD)


def test_a_record_that_cannot_be_read_is_told(samples: LeaseQueue) -> None:
    samples.agree("feed:1", b"{}")
    with pytest.raises(SchemaError, match="not a feed's record"):
        agree_on_feed(samples, "1", RECORD)


@pytest.mark.parametrize("num_bytes", [1, 1000, 2**20 - 1, 2**20, 2**20 + 1, 3 * 2**20 + 17])
def test_a_file_may_grow_at_its_end_as_often_as_it_likes_and_change_nowhere_else(
    samples: LeaseQueue, tmp_path: Path, num_bytes: int
) -> None:
    path, data = tmp_path / "rows.jsonl", bytearray(os.urandom(num_bytes))
    sizes = []
    for _ in range(3):
        path.write_bytes(data)
        for _ in range(2):
            agree_on_file(samples, "1", path, may_grow=True)
        sizes.append(len(data))
        data += os.urandom(num_bytes)
    for at in [0, sizes[0] - 1, sizes[0], sizes[2] - 1]:
        changed = bytearray(data)
        changed[at] ^= 1
        path.write_bytes(changed)
        with pytest.raises(ContractMismatch, match=r"rows\.jsonl: changed since it was fed, wanted data=\d+ bytes"):
            agree_on_file(samples, "1", path, may_grow=True)
    path.write_bytes(data[: sizes[2] - 1])
    with pytest.raises(ContractMismatch, match=f"wanted data={sizes[2]} bytes.*got data={sizes[2] - 1} bytes"):
        agree_on_file(samples, "1", path, may_grow=True)
    agree_on_file(samples, "2", path, may_grow=True)  # the queue was purged


def test_a_file_whose_rows_share_items_may_not_grow(samples: LeaseQueue, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"12")
    for _ in range(2):
        agree_on_file(samples, "1", path, may_grow=False)
    path.write_bytes(b"123")
    with pytest.raises(ContractMismatch, match=r"wanted data=2 bytes.*got data=3 bytes"):
        agree_on_file(samples, "1", path, may_grow=False)


def test_files_are_told_apart_by_where_they_lie(samples: LeaseQueue, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows.jsonl").write_text(name)
        agree_on_file(samples, "1", tmp_path / name / "rows.jsonl", may_grow=False)
    (tmp_path / "link").symlink_to(tmp_path / "a" / "rows.jsonl")
    (tmp_path / "a" / "rows.jsonl").write_text("c")
    with pytest.raises(ContractMismatch, match="changed since it was fed"):
        agree_on_file(samples, "1", tmp_path / "link", may_grow=False)


def test_a_pipe_is_read_by_nobody_but_who_feeds_it(samples: LeaseQueue, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    told = threading.Thread(target=lambda: pipe.write_text("x"), daemon=True)
    told.start()
    agree_on_file(samples, "1", pipe, may_grow=False)
    assert pipe.read_text() == "x"
    told.join(10)

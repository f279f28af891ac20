"""Files that are no JSONL are refused as a whole, and pipes are read as files are."""

import bz2
import gzip
import json
import lzma
import os
import threading
from pathlib import Path

import pytest

from eaglefeed.errors import InputError
from eaglefeed.producer.conversations import Conversation, read_conversations
from eaglefeed.producer.jsonl import ReadReport
from tiny_target import tiny_tokenizer, turns


def row(row_id: str, *contents: str) -> bytes:
    return json.dumps({"id": row_id, "messages": turns(*contents)}).encode()


def read(path: Path) -> list[Conversation]:
    return list(read_conversations(path, tiny_tokenizer(), ReadReport(), max_length=512))


@pytest.mark.parametrize(
    ("content", "form"),
    [
        (gzip.compress(row("a", "hi", "ok"), mtime=0), "gzip"),
        (bz2.compress(row("a", "hi", "ok")), "bzip2"),
        (lzma.compress(row("a", "hi", "ok")), "xz"),
        (b"PK\x03\x04rest", "zip"),
        (b"PAR1rest", "Parquet"),
        (row("a", "hi", "ok").decode().encode("utf-16"), "UTF-16"),
        (row("a", "hi", "ok").decode().encode("utf-16-le"), "UTF-16"),
        (row("a", "hi", "ok").decode().encode("utf-16-be"), "UTF-16"),
        (row("a", "hi", "ok").decode().encode("utf-32"), "UTF-32"),
        (b"[" + row("a", "hi", "ok") + b",\n" + row("b", "hi", "ok") + b"]", "one JSON array"),
        (b"[\n" + row("a", "hi", "ok") + b",\n" + row("b", "hi", "ok") + b"\n]", "one JSON array"),
        (b"\xef\xbb\xbf [ \r\n" + row("b", "hi", "ok") + b"\r\n]", "one JSON array"),
        (b"\n \n[\n" + row("a", "hi", "ok") + b",\n" + row("b", "hi", "ok") + b"\n]", "one JSON array"),
    ],
)
def test_a_file_of_another_form_is_refused_as_a_whole(tmp_path: Path, content: bytes, form: str):
    path = tmp_path / "rows"
    path.write_bytes(content)
    with pytest.raises(InputError, match=f"another form of file, wanted text in UTF-8.*{form}"):
        read(path)


def test_a_file_is_read_once_so_that_a_pipe_will_do(tmp_path: Path):
    pipe, lines = tmp_path / "pipe", [row("a", "hi", "ok"), row("b", "x", "y")]
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(b"\xef\xbb\xbf" + b"\n".join(lines),))
    writer.start()
    found = read(pipe)
    writer.join(10)
    assert [conversation.line for conversation in found] == [1, 2]

"""The file that answers go to: held by one run at a time, and gone on with from where the one before stopped."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO

from eaglefeed.errors import ConfigError, InputError
from eaglefeed.producer.chat import Chat, RowFault, parse_chat
from eaglefeed.producer.jsonl import ReadReport, read_rows

__all__ = ["OTHER_FILE", "answers_before", "appending"]

_ROW_START = b'{"id": "'
_COPY_BYTES = 2**20
OTHER_FILE = "name another output file"
_ROOM = "make room there and start again, it goes on where it stopped"


@contextmanager
def appending(output: Path, prompts: Path) -> Iterator[IO[str]]:
    """Open the file to append to it, made if it is not there; nobody else can meanwhile.

    Raises:
        ConfigError: it is the prompts' own file, or another process writes there.
        InputError: it cannot be written.
    """
    if output.exists() and prompts.exists() and output.samefile(prompts):
        raise ConfigError("the output is the prompts' own file", subject=str(output), fix=OTHER_FILE)
    try:
        with output.open("a", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fix = "wait for its end, or " + OTHER_FILE
                raise ConfigError("another process writes answers here", subject=str(output), fix=fix) from None
            yield file
    except OSError as error:
        raise InputError("cannot be written", subject=str(output), got=error.strerror, fix=_ROOM) from None


def answers_before(output: Path) -> dict[str, int]:
    """Sample id → digest of the prompt, for every answer that is there; to be called while the file is held.

    A last line that was half written is dropped; one that only lacks its line feed gets it. A file that holds anything
    else is left as it is.

    Raises:
        InputError: it holds other things than answers.
    """
    found, done, last_whole = ReadReport(), {}, 0
    for row in read_rows(output, found):
        last_whole = row.line
        try:
            chat = _answered(row.data)
        except RowFault as fault:
            found.reject(row.line, row.id, str(fault))
        else:
            done[chat.sample_id] = chat.digest(-1)
    with output.open("r+b") as file:
        start, half = _unfinished_line(file)
        is_cut = bool(found.rejections) and found.rejections[-1].line > last_whole and _is_ours(half)
        if found.rejected > is_cut:
            got = f"line {found.rejections[0].line}: {found.rejections[0].reason}"
            raise InputError("holds other things than answers", subject=str(output), got=got, fix=OTHER_FILE)
        if is_cut:
            file.truncate(start)
        elif half:
            file.seek(0, os.SEEK_END)
            file.write(b"\n")
    return done


def _answered(row: dict[str, Any]) -> Chat:
    chat = parse_chat(row)
    if chat.messages[-1]["role"] != "assistant":
        raise RowFault(f"no answer: it ends in a turn of {chat.messages[-1]['role']}")
    return chat


def _is_ours(half: bytes) -> bool:
    return bool(half) and (half.startswith(_ROW_START) or _ROW_START.startswith(half))


def _unfinished_line(file: BinaryIO) -> tuple[int, bytes]:
    """Where the line begins that no line feed ends, and its first bytes; b"" if there is none."""
    end = start = file.seek(0, os.SEEK_END)
    while start > 0:
        begin = max(0, start - _COPY_BYTES)
        file.seek(begin)
        newline = file.read(start - begin).rfind(b"\n")
        if newline >= 0:
            start = begin + newline + 1
            break
        start = begin
    file.seek(start)
    return start, file.read(min(len(_ROW_START), end - start))

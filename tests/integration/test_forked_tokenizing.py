"""Tokenizing in processes that were forked after their parent had tokenized with all its threads."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tiny_target import turns

NUM_CHILDREN, ROWS_A_CHILD, NUM_TOKENS = 4, 16, 40_000
_JOB = """
import multiprocessing, sys
from pathlib import Path
from eaglefeed.producer.conversations import read_conversations
from eaglefeed.producer.jsonl import ReadReport
from tiny_target import tiny_tokenizer

TOKENIZER = tiny_tokenizer()

def work(path):
    report = ReadReport()
    return [len(row.input_ids) for row in read_conversations(path, TOKENIZER, report, max_length=1_000_000)]

if __name__ == "__main__":
    TOKENIZER(["many texts at a time " * 200] * 64)
    paths = [Path(name) for name in sys.argv[1:]]
    with multiprocessing.get_context("fork").Pool(len(paths)) as pool:
        print(pool.map(work, paths))
"""


def test_forked_workers_tokenize_long_rows_and_end(tmp_path: Path) -> None:
    paths = [tmp_path / f"{child}.jsonl" for child in range(NUM_CHILDREN)]
    for child, path in enumerate(paths):
        rows = [{"id": f"{child}-{n}", "messages": turns("x" * NUM_TOKENS, "ok")} for n in range(ROWS_A_CHILD)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    script = tmp_path / "job.py"
    script.write_text(_JOB)
    words = [sys.executable, str(script), *map(str, paths)]
    tests = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(words, env=tests, capture_output=True, text=True, timeout=120, check=True)
    length = (
        1 + 5 + NUM_TOKENS + 2 + 11 + 2 + 2
    )  # start, "user\n", the text, end "\n", start "assistant\n", "ok", end "\n"
    assert ended.stdout.splitlines() == [str([[length] * ROWS_A_CHILD] * NUM_CHILDREN)]

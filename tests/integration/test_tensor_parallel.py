"""A model whose embeddings and head are shared between two processes (gloo)."""

import subprocess
import sys
from pathlib import Path

import tensor_parallel_target


def test_all_that_is_handed_out_is_gathered(tmp_path: Path):
    words = [sys.executable, tensor_parallel_target.__file__]
    sides = [
        subprocess.Popen([*words, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        assert [side.communicate(timeout=60)[0] for side in sides] == ["whole", "whole"]
    finally:
        for side in sides:
            side.kill()
            side.wait()

"""A model that is shared between two processes (gloo)."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import tensor_parallel_producer
import tensor_parallel_target


def both(script: ModuleType, *words: str | Path) -> list[str]:
    """What the two processes of a script write."""
    command = [sys.executable, str(script.__file__)]
    sides = [
        subprocess.Popen([*command, str(rank), *map(str, words)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        return [side.communicate(timeout=60)[0] for side in sides]
    finally:
        for side in sides:
            side.kill()
            side.wait()


def test_all_that_is_handed_out_is_gathered(tmp_path: Path):
    assert both(tensor_parallel_target, tmp_path / "store") == ["whole", "whole"]


def test_one_process_publishes_each_sample_once_with_all_logits_made_a_chunk_at_a_time(tmp_path: Path):
    said = both(tensor_parallel_producer, tmp_path / "store", "sharded")
    leader, other = (json.loads(each.splitlines()[-1]) for each in said)
    assert leader == {"published": ["s-0", "s-1", "s-2", "s-3"], "widths": [16], "longest": 3}
    assert other == {"published": []}


def test_logits_that_are_one_processs_slice_are_refused_by_both(tmp_path: Path):
    for said in both(tensor_parallel_producer, tmp_path / "store", "local"):
        refused = json.loads(said.splitlines()[-1])["refused"]
        assert "its logits are of a part of its vocabulary" in refused
        assert "wanted 16, got 8; gather them in the model" in refused

"""What a process that was forked makes of its parent's connections and threads."""

import subprocess
import sys
from pathlib import Path

from coded_target import CodedTarget
from http_sides import App
from http_sides import serving as serving_app
from target_servers import serving

TESTS = Path(__file__).parents[1]

FORK = """
import os, sys
from coded_target import row
from eaglefeed.consumer.remote import RemoteEagle3TargetModel
from eaglefeed.errors import TargetError
from eaglefeed.storage.control import ControlClient

client = ControlClient(sys.argv[1])
model = RemoteEagle3TargetModel([sys.argv[2]], device="cpu")
port = lambda: client.call("/port", timeout_s=20).body
first = port()
model.generate_batch(*row(1, 2))
child = os.fork()
if child == 0:
    own = port()
    print(own != first, own == port())
    try:
        model.generate_batch(*row(1, 2))
    except TargetError as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(port() == first, model.generate_batch(*row(1, 2)).input_ids.tolist())
model.close()
client.close()
"""


def test_a_forked_child_has_its_own_connections_and_is_told_to_make_its_own_model() -> None:
    with serving_app(App()) as app, serving(CodedTarget()) as server:
        words = [sys.executable, "-c", FORK, app.url, server.url]
        done = subprocess.run(words, cwd=TESTS, capture_output=True, text=True, timeout=60, check=True)
    own, refused, parent = done.stdout.splitlines()
    assert own == "True True"
    assert "cannot be used after fork; make another one in this process" in refused
    assert parent == "True [[2, 0]]"

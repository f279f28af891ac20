"""Runs a server, and ends it with its parent: `python guard.py GRACE_S FOLDER COMMAND ...`, in a session of its own.

It imports nothing of ours. Its input is a pipe that nobody writes to: when that ends, the parent has closed it or has
died, and everything goes: the server, which has GRACE_S seconds for it, whatever the server started, and FOLDER.
"""

import os
import select
import shutil
import signal
import subprocess
import sys

__all__ = ["main"]

_LOOK_S = 0.2


def main(grace_s: float, folder: str, command: list[str]) -> None:
    """Run the command until it ends or the input does; then end every process of this session's group."""
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while server.poll() is None:
        if select.select([0], [], [], _LOOK_S)[0]:
            _end(server, grace_s)
            shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _end(server: subprocess.Popen[bytes], grace_s: float) -> None:
    os.killpg(0, signal.SIGTERM)
    try:
        server.wait(grace_s)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2], sys.argv[3:])

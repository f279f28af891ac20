"""A coded target's server as a process of its own: prints its address when it is ready, drains on SIGTERM.

usage: target_process FORWARD_S MAX_IN_FLIGHT
"""

import sys
import threading
import time
from typing import Any

import torch
from torch import Tensor

from coded_target import CodedTarget
from eaglefeed.producer.opening import info_of
from eaglefeed.producer.server import TargetServer
from eaglefeed.signals import stop_on_signals


class LeanTarget(CodedTarget):
    """Forwards that take a while, and little memory besides their answers, 12 KiB a token."""

    def __init__(self, forward_s: float) -> None:
        super().__init__(hidden_size=1024)
        self.forward_s = forward_s

    def _forward(self, rows: Any, position_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        time.sleep(self.forward_s)
        aux = torch.arange(1.0, 3 * self.hidden_size + 1).repeat(*rows.input_ids.shape, 1)
        aux += rows.input_ids.cumsum(-1)[..., None]
        last = torch.zeros(*rows.input_ids.shape, self.hidden_size).scatter_(-1, rows.input_ids[..., None], 1.0)
        return aux, last


def main() -> None:
    torch.set_num_threads(1)
    target = LeanTarget(float(sys.argv[1]))
    server = TargetServer(target, info_of(target, "process"), max_in_flight=int(sys.argv[2]), batch_tokens=1)
    stop = threading.Event()
    with stop_on_signals(stop.set):
        stats = server.serve(stop, lambda: say(server.url))
    say(stats.answered)


def say(what: object) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()

"""The processes of the bench of a remote target: our servers and their client, a peer's, and bare transports."""

import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from eaglefeed.bench.comparison import Peer
from eaglefeed.bench.partners import Partner
from eaglefeed.bench.remote_answers import SLEEPING_TOKENS, SMALL_TOKENS, WARM_UP_TOKENS, Answer, write_answers
from eaglefeed.bench.remote_peers import remote_peer
from eaglefeed.bench.remote_plan import RemotePlan

__all__ = ["RemoteBed", "Server", "opened_remote_bed", "planes"]

_SMALL_VOCAB = 64


class Server:
    """A server of ours in its process, which starts while others do."""

    def __init__(self, partner: Partner) -> None:
        self.partner = partner

    @cached_property
    def url(self) -> str:
        """Where it listens, once its target is warm."""
        return str(self.partner.line()["url"])


@dataclass(frozen=True, kw_only=True)
class RemoteBed:
    """Processes that wait for what to measure.

    Args:
        answers: that the targets give, by their tokens.
        client: of ours, for all of our servers.
        small: the server with small answers.
        slow: the server that slow clients use.
        bare: the receiver of bare transports.
        peer: a peer's client, if one is compared with.
    """

    answers: Mapping[int, Answer]
    client: Partner
    small: Server
    slow: Server
    bare: Partner
    peer: Partner | None


def planes() -> dict[str, str]:
    """Data planes that this machine has, and the device that the answers are on."""
    return {"http": "cpu", "gloo": "cpu"} | ({"nccl": "cuda"} if torch.cuda.is_available() else {})


@contextmanager
def opened_remote_bed(plan: RemotePlan, peer: Peer | None) -> Iterator[RemoteBed]:
    """All processes, ready, until the end of the block."""
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-remote-")))
        answers = write_answers(root, plan)
        servers = _Servers(stack, answers, plan)
        large = {device: servers.open(plan.tokens, device=device) for device in set(planes().values())}
        small = [servers.open(SMALL_TOKENS, SLEEPING_TOKENS, are_copied=True) for _ in range(2)]
        slow = servers.open(plan.memory_tokens, WARM_UP_TOKENS, are_copied=True, max_in_flight=plan.slow_clients)
        bare = _bare(stack, answers[plan.tokens].num_bytes)
        models = {plane: _words(plan, [large[device]], plane, device) for plane, device in planes().items()}
        models |= {f"small_{n}": _words(plan, small[:n], vocab=_SMALL_VOCAB) for n in (1, 2)}
        named = {str(tokens): str(answer.path) for tokens, answer in answers.items()}
        client = stack.enter_context(_ours("fetch", {"answers": named, "models": models}))
        other = stack.enter_context(remote_peer(peer, named)) if peer else None
        client.line()  # it is ready
        yield RemoteBed(answers=answers, client=client, small=small[0], slow=slow, bare=bare, peer=other)


def _ours(role: str, task: Mapping[str, object]) -> Partner:
    command = [sys.executable, "-m", "eaglefeed.bench.remote_worker", role]
    return Partner(f"bench remote_worker {role}", command, task)


class _Servers:
    def __init__(self, stack: ExitStack, answers: Mapping[int, Answer], plan: RemotePlan) -> None:
        self._stack, self._answers, self._plan = stack, answers, plan

    def open(
        self, *tokens: int, device: str = "cpu", are_copied: bool = False, max_in_flight: int | None = None
    ) -> Server:
        """Start one that has the answers of these tokens."""
        task = {
            "answers": {str(number): str(self._answers[number].path) for number in tokens},
            "device": device,
            "sleep_s": self._plan.sleep_s,
            "are_copied": are_copied,
            "max_in_flight": max_in_flight or self._plan.several,
        }
        return Server(self._stack.enter_context(_ours("serve", task)))


def _words(
    plan: RemotePlan, servers: list[Server], plane: str = "http", device: str = "cpu", vocab: int | None = None
) -> dict[str, Any]:
    """How the client opens these servers."""
    return {
        "urls": [server.url for server in servers],
        "data_plane": plane,
        "device": device,
        "in_flight": plan.several,
        "draft_vocab": vocab or plan.draft_vocab,
    }


def _bare(stack: ExitStack, num_bytes: int) -> Partner:
    command, task = [sys.executable, "-m", "eaglefeed.bench.remote_raw"], {"num_bytes": num_bytes}
    sender = stack.enter_context(Partner("bench remote_raw send", [*command, "send"], task))
    receiver = stack.enter_context(Partner("bench remote_raw receive", [*command, "receive"], task | sender.line()))
    receiver.line()
    return receiver

"""A server's memory: while clients do not read what they asked for, and over many small requests."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack

import torch

from eaglefeed.bench.plan import Reading
from eaglefeed.bench.remote_answers import SMALL_TOKENS, WARM_UP_TOKENS
from eaglefeed.bench.remote_bed import RemoteBed, Server
from eaglefeed.bench.remote_plan import RemotePlan
from eaglefeed.clock import SYSTEM_CLOCK
from eaglefeed.consumer.remote_rows import RowsRequest, VocabSession
from eaglefeed.schema.protocol import EXACT_HEADER, GENERATE, REQUEST_HEADER, SESSION_HEADER, SET_VOCAB_MAPPING
from eaglefeed.storage.control import ControlClient, Incoming

__all__ = ["measure_growth", "measure_slow_clients"]

_MB = 1e6
_HOLD_S = 1.0
"""How long clients do not read, while one more request waits."""
_TIMEOUT_S = 60.0


def measure_slow_clients(bed: RemoteBed, plan: RemotePlan) -> Iterator[Reading]:
    """The most memory beyond what the server had before, in answers and over the requests in flight.

    Each of `slow_clients` asks for an answer and reads its header alone, so that the server has as many answers as it
    may; one more request waits. Then all are read. Small answers went through before, as many at a time.
    """
    client = _SlowClient(bed.slow.url, plan.draft_vocab)
    client.hold(plan.slow_clients, WARM_UP_TOKENS, 0.0)
    before = _memory(bed.slow)["VmRSS"]
    client.hold(plan.slow_clients, plan.memory_tokens, _HOLD_S)
    answers = (_memory(bed.slow)["VmHWM"] - before) / bed.answers[plan.memory_tokens].num_bytes
    in_flight = plan.slow_clients + 1
    yield Reading("memory.peak", "answers", answers)
    yield Reading("memory.in_flight", "requests", in_flight)
    yield Reading("memory.peak_over_in_flight", "answers/request", answers / in_flight)
    client.close()


def measure_growth(bed: RemoteBed, plan: RemotePlan) -> Iterator[Reading]:
    """What many small requests leave in the memory of a server that has had some before."""
    words = {"model": "small_1", "tokens": SMALL_TOKENS, "in_flight": plan.several, "check": False}
    bed.client.ask(count=plan.growth_warm_up, **words)
    before = _memory(bed.small)["VmRSS"]
    bed.client.ask(count=plan.growth_requests, **words)
    yield Reading("memory.growth", "MB", (_memory(bed.small)["VmRSS"] - before) / _MB)


def _memory(server: Server) -> dict[str, int]:
    return server.partner.ask()


class _SlowClient:
    """Asks a server, and reads the answers when it pleases."""

    def __init__(self, url: str, draft_vocab: int) -> None:
        self._client = ControlClient(url)
        self._session = VocabSession.of(torch.arange(draft_vocab), torch.ones(draft_vocab, dtype=torch.bool))
        headers = {SESSION_HEADER: self._session.name}
        self._client.call(SET_VOCAB_MAPPING, self._session.body, headers=headers, timeout_s=_TIMEOUT_S)

    def hold(self, count: int, tokens: int, hold_s: float) -> None:
        """Ask `count` times and once more, read nothing for that long, and then everything."""
        with ExitStack() as stack:
            more = stack.enter_context(ThreadPoolExecutor(1))
            answers = [stack.enter_context(self._ask(tokens)) for _ in range(count)]
            waiting = more.submit(self._read_one, tokens)
            SYSTEM_CLOCK.sleep(hold_s)
            for answer in answers:
                _read(answer)
            waiting.result()

    def close(self) -> None:
        """Hang up."""
        self._client.close()

    def _ask(self, tokens: int) -> AbstractContextManager[Incoming]:
        ones = torch.ones(1, tokens, dtype=torch.int64)
        request = RowsRequest(ones, ones, ones, session=self._session)
        headers = {SESSION_HEADER: self._session.name, REQUEST_HEADER: request.id, EXACT_HEADER: "1"}
        return self._client.open(GENERATE, request.body, headers=headers, timeout_s=_TIMEOUT_S)

    def _read_one(self, tokens: int) -> None:
        with self._ask(tokens) as answer:
            _read(answer)


def _read(answer: Incoming) -> None:
    answer.readinto(memoryview(bytearray(int(answer.headers["content-length"]))))

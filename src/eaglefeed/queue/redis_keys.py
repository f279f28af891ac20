"""The queue's keys on a server, its groups, and how its scripts are run.

Keys are `eaglefeed:{namespace}:<queue>:<name>`, and `eaglefeed:{namespace}:<queue>:<group>:<name>` for what is a
group's own. The braces are one hash tag a run, so that one script can touch both of its queues. The names and types
stand in the scripts' comments; `…:workers` and the clients' `…:replay:<client>` are shared by the run's queues.
"""

import random
import threading
from collections.abc import Callable, Collection, Iterator
from itertools import islice
from typing import Any, Self

from eaglefeed.errors import UnsafeServer
from eaglefeed.logs import get_logger
from eaglefeed.queue import rules
from eaglefeed.queue.base import MAIN_GROUP, MAX_BATCH
from eaglefeed.queue.connection import QueueClient
from eaglefeed.queue.scripts import Keys, Script, load

__all__ = ["RedisKeys", "batched"]

_log = get_logger(__name__)

_SHARED = frozenset({"digest", "ref", "seq", "bytes", "pending", "released", "held", "recalled", "ctl", "room"})
Route = tuple[Keys, str, threading.Lock]
_MAX_WAIT_S, _MIN_WAIT_S = 1.0, 0.01


def batched(names: Collection[str]) -> Iterator[list[str]]:
    """Chunks of as many names as one command takes."""
    rest = iter(names)
    while chunk := list(islice(rest, MAX_BATCH)):
        yield chunk


class RedisKeys:
    """One queue of a run on a server, as one of its groups sees it."""

    def __init__(
        self,
        client: QueueClient,
        namespace: str,
        name: str,
        group: str = MAIN_GROUP,
        *,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.namespace, self.name = rules.check_name("run", namespace), rules.check_name("queue", name)
        self.group = rules.check_name("group", group)
        self._client, self._jitter = client, jitter
        self._declared: tuple[str, ...] | None = None
        self._newest_token = 0
        self._routes: dict[tuple[str, str], Route] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._client, self.namespace, self.name, self.group)

    def key(self, name: str, group: str = "") -> str:
        """The key called `name` in the scripts, of this group or of `group`."""
        queue = f"eaglefeed:{{{self.namespace}}}:{self.name}"
        return f"{queue}:{name}" if name in _SHARED else f"{queue}:{group or self.group}:{name}"

    def _run_key(self, name: str) -> str:
        client = f":{self._client.id}" if name == "replay" else ""
        return f"eaglefeed:{{{self.namespace}}}:{name}{client}"

    def _sibling(self, name: str | None) -> Self:
        return self if name is None else type(self)(self._client, self.namespace, name)

    def groups(self) -> tuple[str, ...]:
        """See LeaseQueue."""
        if self._declared is None:
            told = self._client.call("HGET", self.key("ctl"), "groups")
            if told is None:
                return (MAIN_GROUP,)
            self._declared = tuple(told.decode().split())
        return self._declared

    def _check_group(self) -> None:
        rules.check_group(self.name, self.group, self.groups())

    def _run(self, name: str, *args: str | bytes | float, to: "RedisKeys | None" = None) -> Any:
        """Run a script on this queue; `to` is the samples queue of a hand-off or recall."""
        script = load(name)
        keys, call, turn = self._routes.get((name, to.name if to else "")) or self._route(name, script, to)
        if not script.replays:
            return self._client.run(script, keys, args)
        with turn:
            return self._client.run(script, keys, (*args, self._client.next_number(), call))

    def _route(self, name: str, script: Script, to: "RedisKeys | None") -> Route:
        """A script's keys, and the call's name and turn; kept once the groups are known for good."""
        if any(table == "q" and key not in _SHARED for table, key in script.keys):
            self._check_group()
        tables = {
            "q": self.key,
            "run": self._run_key,
            "prompts": self.key if to else self._sibling(rules.prompts_of(self.name)).key,
            "samples": to.key if to else self._sibling(rules.samples_of(self.name)).key,
        }
        keys, queue = [tables[table](key) for table, key in script.keys], to or self
        if script.each:
            keys += [queue.key(key, group) for group in queue.groups() for key in script.each]
        call = f"{self.name}/{self.group}/{name}"
        route = Keys(keys), call, self._client.turn(f"{self.namespace}/{call}")
        if self._declared is not None and queue._declared is not None:
            self._routes[name, to.name if to else ""] = route
        return route

    def _note_loss(self, *, is_there: bool) -> None:
        """The server has forgotten what it told this client: all of the run, or its newest part."""
        self._newest_token = 0
        if not is_there:
            self._declared = None
            fix = "stop all of the run, see why (FLUSHALL, no append-only file, another server), then `eaglefeed store "
            raise UnsafeServer(
                "the server lost the run's data", subject=f"{self.namespace}/{self.name}", fix=f"{fix}rebuild` and feed"
            )
        fix = "feed again, and start trainers again: they settle what their checkpoints have seen"
        _log.warning("server_lost_writes", run=self.namespace, queue=self.name, group=self.group, fix=fix)

    def _wait_for(self, key: str, wait_s: float) -> None:
        # 0 would wait for ever, and a second is well below the socket's timeout
        self._client.call("BLPOP", self.key(key), f"{min(max(wait_s, _MIN_WAIT_S), _MAX_WAIT_S):.3f}")

    def _fields(self, key: str, names: Collection[str], group: str = "") -> set[str]:
        """Those fields of a hash that are there."""
        found = set[str]()
        for chunk in batched(names):
            values = self._client.call("HMGET", self.key(key, group), *chunk)
            found.update(name for name, value in zip(chunk, values, strict=True) if value is not None)
        return found

    def _held(self) -> dict[str, bytes]:
        """Each held prompt's producer."""
        return {name.decode(): holder for page in self._pages(self.key("held")) for name, holder in page.items()}

    def _places(self, ids: Collection[str]) -> dict[str, float]:
        """The places in put order of those of `ids` that are not released."""
        found = dict[str, float]()
        for chunk in batched(ids):
            places = self._client.call("ZMSCORE", self.key("seq"), *chunk)
            found.update((name, float(place)) for name, place in zip(chunk, places, strict=True) if place is not None)
        return found

    def _pages(self, key: str) -> Iterator[dict[bytes, bytes]]:
        """A hash in bounded steps; each field comes once."""
        cursor, seen = b"0", set[bytes]()
        while True:
            cursor, flat = self._client.call("HSCAN", key, cursor, "COUNT", rules.PAGE)
            pairs = zip(flat[::2], flat[1::2], strict=True)
            page = {name: value for name, value in pairs if name not in seen}
            seen.update(page)
            if page:
                yield page
            if cursor == b"0":
                return

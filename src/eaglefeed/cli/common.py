"""What the commands share: options, settings, the run's queues and store, a clean stop on a signal."""

import json
import os
import secrets
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from eaglefeed import logs
from eaglefeed.access import read_token
from eaglefeed.config import Settings, load_settings
from eaglefeed.errors import ConfigError
from eaglefeed.queue import EmbeddedServer, connect, open_queue
from eaglefeed.queue.base import MAIN_GROUP, LeaseQueue
from eaglefeed.queue.connection import QueueClient
from eaglefeed.signals import stop_on_signals
from eaglefeed.storage.base import FeatureStore, open_store
from eaglefeed.storage.options import PeerOptions

__all__ = [
    "ConfigOption",
    "EngineOption",
    "JsonOption",
    "RedisOption",
    "RunOption",
    "RunQueues",
    "StoreOption",
    "TargetOption",
    "VocabOption",
    "access_token",
    "connected",
    "emit",
    "is_with_producers",
    "open_queues",
    "opened_store",
    "read_settings",
    "stop_on_signals",
    "worker_name",
]

ConfigOption = Annotated[Path | None, typer.Option("--config", help="YAML file with settings.")]
RunOption = Annotated[str | None, typer.Option("--run", help="Id of the run.")]
RedisOption = Annotated[
    str | None, typer.Option("--redis", help="Address of the queue; else EAGLEFEED_REDIS_URL, else a local server.")
]
StoreOption = Annotated[str | None, typer.Option("--store", help="Folder or address of the store.")]
TargetOption = Annotated[str | None, typer.Option("--target", help="Hugging Face id or local folder of the target.")]
EngineOption = Annotated[str | None, typer.Option("--engine", help="What runs the target: hf, vllm or sglang.")]
_VOCAB_HELP = (
    "Vocabulary map of the draft: samples hold target_probs over it, unless produce.supervision says otherwise."
)
VocabOption = Annotated[Path | None, typer.Option("--vocab", help=_VOCAB_HELP)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_PEERS = "nccl://"
_BIRTH = secrets.token_hex(3)


@dataclass(frozen=True)
class RunQueues:
    """The two queues of a run: the prompts, and the samples as one group sees them."""

    client: QueueClient
    run: str
    prompts: LeaseQueue
    samples: LeaseQueue

    @property
    def address(self) -> str:
        """Where they lie, without a password."""
        return self.client.address

    def named(self, name: str, group: str = MAIN_GROUP) -> LeaseQueue:
        """Any queue of the run, as any of its groups sees it."""
        return open_queue(self.client, self.run, name, group)


def read_settings(ctx: typer.Context, config: Path | None, **options: object) -> Settings:
    """The settings of a command, and its logging.

    Args:
        ctx: carries the `section.field=value` words.
        config: the YAML file.
        options: "section__field" or "redis_url" → value, None where the option was not given; `section.field=value`
            on the command line wins over them.
    """
    given = [f"{name.replace('__', '.')}={value}" for name, value in options.items() if value is not None]
    settings = load_settings(config, [*given, *(ctx.obj or [])])
    logs.configure(run=settings.run.id)
    return settings


@contextmanager
def open_queues(
    settings: Settings, *, group: str = MAIN_GROUP, max_wait_s: float | None = None, known: bool = False
) -> Iterator[RunQueues]:
    """Connect to the run's queues; without an address, find or start the local server of the run's folder.

    Args:
        settings: name the run and the address.
        group: of the samples queue.
        max_wait_s: how long a server that is out of reach is waited for; queue.max_wait_s by default.
        known: the run must be there: a look at a run never makes one.

    Raises:
        ConfigError: it is not there.
    """
    folder, max_wait_s = settings.run_dir / "queue", max_wait_s or settings.queue.max_wait_s
    if known and not settings.redis_url and not folder.is_dir():
        fix = "check --run and the folder you are in, or pass --redis with the queue's address"
        raise ConfigError("no such run here", subject=str(settings.run_dir), fix=fix)
    with ExitStack() as stack:
        if settings.redis_url:
            client = connected(settings, max_wait_s=max_wait_s)
        else:
            server = stack.enter_context(EmbeddedServer(folder))
            client = connect(server.url, max_wait_s=max_wait_s)
        stack.callback(client.close)
        run = settings.run.id
        prompts, samples = open_queue(client, run, "prompts"), open_queue(client, run, "samples", group)
        yield RunQueues(client, run, prompts, samples)


def connected(
    settings: Settings, *, max_wait_s: float, connect_by: Callable[..., QueueClient] = connect
) -> QueueClient:
    """A client of the server that the settings name, with their password and their authority.

    Args:
        settings: name an address.
        max_wait_s: how long a server that is out of reach is waited for.
        connect_by: `connect`, or `open_client`, which judges nothing.
    """
    queue = settings.queue
    return connect_by(
        settings.redis_url,
        password=queue.password.get_secret_value() if queue.password else None,
        password_file=queue.password_file,
        tls_ca_file=queue.tls_ca_file,
        max_wait_s=max_wait_s,
    )


def is_with_producers(settings: Settings) -> bool:
    """Whether the run's samples stay with their producers."""
    return settings.store_uri.startswith(_PEERS)


@contextmanager
def opened_store(settings: Settings, *, keeps: bool = False, peer: PeerOptions | None = None) -> Iterator[FeatureStore]:
    """The run's store.

    Args:
        settings: name it.
        keeps: this is a producer: of nccl://HOST:PORT, which one file of settings may say to all, it alone listens.
        peer: for nccl://, what the settings do not say.

    Raises:
        ConfigError: it is in this process's memory, which no other command sees, or no such kind of store.
    """
    if settings.store_uri.startswith("mem://"):
        what, fix = "its samples are gone when this command ends", "use shm://name or file:///folder"
        raise ConfigError(what, subject=settings.store_uri, wanted="a store that processes share", fix=fix)
    if is_with_producers(settings):
        store = _peer_store(settings, keeps, peer or PeerOptions())
    else:
        store = open_store(settings.store_uri, durability=settings.store.durability, verify=settings.store.verify)
    try:
        yield store
    finally:
        store.close()


def _peer_store(settings: Settings, keeps: bool, peer: PeerOptions) -> FeatureStore:
    uri = settings.store_uri if keeps else _PEERS
    if keeps and uri == _PEERS:
        fix = "pass --store nccl://HOST:PORT, where trainers reach this producer"
        raise ConfigError("a producer needs an address of its own", subject=uri, fix=fix)
    options = replace(
        peer,
        token=access_token(settings),
        data_plane=settings.store.data_plane,
        capacity_bytes=settings.store.peer_bytes,
        pinned=settings.store.peer_pinned,
    )
    return open_store(uri, verify=settings.store.verify, peer=options)


def access_token(settings: Settings) -> str:
    """The token of everything that listens; "" without one.

    Raises:
        ConfigError: its file cannot be read, or holds too short a one.
    """
    access = settings.access
    if access.token is not None:
        return access.token.get_secret_value()
    return "" if access.token_file is None else read_token(access.token_file)


def worker_name() -> str:
    """A name that is this process's alone, also where a restarted container has the same host and pid."""
    return f"{socket.gethostname()}-{os.getpid()}-{_BIRTH}"


def emit(as_json: bool, document: dict[str, Any], lines: list[str]) -> None:
    """Print a result: one JSON object, or lines for people."""
    text = json.dumps(document, default=str) + "\n" if as_json else "".join(f"{line}\n" for line in lines)
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # who read it has gone, and what it tells of is done
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter's end would fail

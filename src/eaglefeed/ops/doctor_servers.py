"""The doctor's look at what runs the target elsewhere: engines, and target servers of other machines."""

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path

from eaglefeed.ops.doctor import Finding, Said, fail, look, ok, warn

__all__ = ["EnginePlan", "examine_engine", "examine_servers"]

_ASK_S, _START_S = 5.0, 70.0
_UNREADY = 503


@dataclass(frozen=True)
class EnginePlan:
    """What runs the target; the names are those of the target's settings."""

    engine: str
    engine_url: str
    engine_dir: Path | None
    engine_python: str


def examine_engine(plan: EnginePlan) -> Iterator[Finding]:
    """Look at the engine; nothing is started."""
    if plan.engine == "vllm":
        yield from look("target.engine", partial(_vllm, plan), _START_S)
    elif plan.engine == "sglang":
        yield from look("target.engine", _sglang)


def _vllm(plan: EnginePlan) -> Iterator[Said]:
    if not plan.engine_url:
        from eaglefeed.producer.engines.vllm_launch import check_installed

        python = plan.engine_python or sys.executable
        check_installed(python)
        yield ok(f"{python} has a vLLM that can be driven")
        return
    from eaglefeed.storage.control import ControlClient, Refused

    client = ControlClient(plan.engine_url)
    try:
        client.call("/health", method="GET", timeout_s=_ASK_S)
    except Refused as refused:
        yield fail(f"{client.url} answers {refused.status} to /health", "see the log of that vLLM server")
    else:
        yield ok(f"{client.url} answers")
    finally:
        client.close()
    yield from _captures(plan.engine_dir)


def _captures(folder: Path | None) -> Iterator[Said]:
    if folder is None:
        fix = "pass its shared_storage_path as target.engine_dir"
        yield fail("a running engine needs the folder of its captures", fix)
    elif not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        yield fail(f"{folder} cannot be read and cleaned here", "share it with the engine, for this user too")


def _sglang() -> Iterator[Said]:
    try:
        yield ok(f"SGLang {metadata.version('sglang')} is installed")
    except metadata.PackageNotFoundError:
        yield fail("SGLang is not installed", "pip install 'sglang>=0.5.23,<0.6' here, or use target.engine=vllm")


def examine_servers(urls: Sequence[str], token: str) -> Iterator[Finding]:
    """Look at target servers (`eaglefeed serve-target`), each of which is asked whether it is ready."""
    for url in urls:
        yield from look("target.server", partial(_server, url, token))


def _server(url: str, token: str) -> Iterator[Said]:
    from eaglefeed.schema.protocol import MODEL_INFO, READY, ModelInfo
    from eaglefeed.storage.control import ControlClient, Refused

    client = ControlClient(url, token=token)
    try:
        client.call(READY, method="GET", timeout_s=_ASK_S)
        info = ModelInfo.from_json(client.call(MODEL_INFO, timeout_s=_ASK_S).body, client.url)
        yield ok(f"{client.url} serves {info.target} with {info.engine} in {info.dtype}")
    except Refused as refused:
        if refused.status != _UNREADY:
            raise refused.error from None
        yield warn(f"{client.url} is not ready yet", "wait until it has loaded its target, or see its log")
    finally:
        client.close()

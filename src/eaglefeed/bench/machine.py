"""Where and with what the figures were measured."""

import os
import platform
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

from eaglefeed import __version__
from eaglefeed.bench.bed import Bed

__all__ = ["describe_machine", "describe_server", "describe_versions", "process_bytes"]


def describe_machine() -> dict[str, Any]:
    """The processor, its cores and the system."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": f"{platform.system()} {platform.release()}",
    }


def _cpu_model() -> str:
    told = Path("/proc/cpuinfo")
    lines = told.read_text(encoding="utf-8").splitlines() if told.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def describe_versions(bed: Bed) -> dict[str, str]:
    """What took part, but for the peers."""
    told = bed.info("server")
    name = told.get("server_name", "redis")
    return {
        "eaglefeed": __version__,
        "server": f"{name} {told.get(f'{name}_version', told['redis_version'])}",
        "python": platform.python_version(),
        "redis-py": version("redis"),
    }


def describe_server(bed: Bed) -> dict[str, Any]:
    """How the server keeps its data, and by which of its counts its CPU time was measured."""
    settings = {}
    for name in ("appendonly", "appendfsync", "io-threads"):
        found = bed.client.call("CONFIG", "GET", name)
        settings[name] = found[1].decode() if found else None
    return {
        "address": bed.client.address,
        "allocator": bed.allocator,
        **settings,
        "cpu_time": " + ".join(bed.cpu_fields),
    }


def process_bytes(field: str) -> int:
    """A field of this process's /proc/self/status: VmRSS is what is in memory now, VmHWM the most that ever was."""
    (found,) = re.findall(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    return int(found) * 1024

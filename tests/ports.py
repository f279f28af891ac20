"""Ports for tests that must know one beforehand."""

import socket

__all__ = ["free_port"]


def free_port() -> int:
    """A port that nobody listened on just now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])

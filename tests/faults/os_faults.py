"""Faults of the operating system, injected in this process: the n-th call of one of os' functions fails."""

import os
from collections.abc import Callable

import pytest

from eaglefeed.storage.shared_dir import SharedDirStore

__all__ = ["calls_of", "fail_call", "instead_of", "left_over"]


def fail_call(monkeypatch: pytest.MonkeyPatch, name: str, code: int, *, at: int = 1) -> list[int]:
    """Make the `at`-th call of os.<name> raise OSError; returns a list that grows by the number of each call."""
    real, seen = getattr(os, name), list[int]()

    def call(*args: object, **named: object) -> object:
        seen.append(len(seen) + 1)
        if len(seen) == at:
            raise OSError(code, os.strerror(code))
        return real(*args, **named)

    monkeypatch.setattr(os, name, call)
    return seen


def instead_of(monkeypatch: pytest.MonkeyPatch, name: str, act: Callable[..., object]) -> None:
    """Have `act(real, *args, **named)` called instead of os.<name>."""
    real = getattr(os, name)
    monkeypatch.setattr(os, name, lambda *args, **named: act(real, *args, **named))


def calls_of(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[str]:
    """A list that grows by the name of each call of these functions of os."""
    seen: list[str] = []

    def note(name: str) -> Callable[..., object]:
        def act(real: Callable[..., object], *args: object, **named: object) -> object:
            seen.append(name)
            return real(*args, **named)

        return act

    for name in names:
        instead_of(monkeypatch, name, note(name))
    return seen


def left_over(store: SharedDirStore) -> list[str]:
    """Every file below the store's root."""
    return sorted(str(path.relative_to(store.root)) for path in store.root.rglob("*") if path.is_file())

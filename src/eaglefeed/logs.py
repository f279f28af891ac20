"""Structured logs: readable lines on a terminal, one JSON object a line elsewhere, always on stderr."""

import logging
import sys
from typing import cast

import structlog

__all__ = ["bind", "configure", "get_logger"]

_bound: dict[str, str] = {}


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """A logger whose calls take an event name and the ids it is about."""
    return cast("structlog.stdlib.BoundLogger", structlog.get_logger(name))


def configure(level: str = "INFO", *, json: bool | None = None, **context: str) -> None:
    """Set up logging for this process.

    Args:
        level: the lowest level that is shown.
        json: one JSON object a line; by default wherever stderr is not a terminal.
        context: fields that every line carries, such as `run="demo"` and `role="producer"`.
    """
    as_json = not sys.stderr.isatty() if json is None else json
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer()
    )
    structlog.configure(
        processors=[
            _with_bound,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=lambda *_: structlog.WriteLogger(sys.stderr),
    )
    _bound.clear()
    bind(**context)


def bind(**context: str) -> None:
    """More fields that every line of this process carries, whichever thread writes it: run, role, worker."""
    _bound.update(context)


def _with_bound(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    return {**_bound, **event}

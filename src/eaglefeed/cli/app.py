"""The app: its commands, its exit codes, and `section.field=value` on every command line."""

import os
import re
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer

from eaglefeed import __version__
from eaglefeed.cli import (
    answers,
    bench,
    data,
    demo,
    doctor,
    feed,
    produce,
    queue,
    report,
    serve_target,
    store,
    train,
    validate,
    vocab,
)
from eaglefeed.errors import (
    BuffersHeld,
    ConfigError,
    EaglefeedError,
    IdConflict,
    InputError,
    NoProducers,
    QueueClosed,
    QueueUnavailable,
    RankGone,
    SampleCorrupt,
    SampleMissing,
    SchemaError,
    StorageError,
    TargetUnavailable,
    UnsafeServer,
)

__all__ = ["EXIT_CODES", "app", "exit_code", "main"]

EXIT_CODES: tuple[tuple[type[EaglefeedError], int], ...] = (
    (ConfigError, 2),
    (InputError, 3),
    (SchemaError, 3),
    (SampleCorrupt, 3),
    (IdConflict, 3),
    (QueueClosed, 2),
    (QueueUnavailable, 4),
    (UnsafeServer, 4),
    (NoProducers, 4),
    (RankGone, 4),
    (SampleMissing, 1),
    (BuffersHeld, 1),
    (StorageError, 4),
    (TargetUnavailable, 4),
)
"""0 ok, 2 usage or configuration, 3 validation failed, 4 a dependency is out of reach, 130 interrupted, else 1."""

_OVERRIDE = re.compile(r"[a-z_]+\.[a-z_]+=.*|redis_url=.*", re.DOTALL)

app = typer.Typer(
    name="eaglefeed",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=False,
)
app.command("demo")(demo.demo)
app.command("answers")(answers.answers)
app.command("vocab")(vocab.vocab)
app.command("feed")(feed.feed)
app.command("produce")(produce.produce)
app.command("train")(train.train)
app.command("serve-target")(serve_target.serve_target)
app.command("validate")(validate.validate)
app.command("doctor")(doctor.doctor)
app.command("report")(report.report)
app.add_typer(queue.app, name="queue")
app.add_typer(store.app, name="store")
app.add_typer(data.app, name="data")
app.add_typer(bench.app, name="bench")


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"eaglefeed {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Stream EAGLE-3 supervision from target models to draft trainers.

    The order of the work: answers, vocab, feed, produce, train. Every command takes section.field=value, such as
    target.dtype=float32.
    """


def exit_code(error: EaglefeedError) -> int:
    """The exit code that a class of errors has."""
    return next((code for kind, code in EXIT_CODES if isinstance(error, kind)), 1)


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command and exit with its code; an error that a user can cause is one line on stderr."""
    words = list(sys.argv[1:] if argv is None else argv)
    _mend_streams()
    overrides = [word for word in words if _OVERRIDE.fullmatch(word)]
    try:
        app(args=[word for word in words if word not in overrides], prog_name="eaglefeed", obj=overrides)
    except EaglefeedError as error:
        sys.stderr.write(f"eaglefeed: {error}\n")
        sys.exit(exit_code(error))
    except OSError as error:  # such as a full disk under a temporary file
        sys.stderr.write(f"eaglefeed: {error}\n")
        sys.exit(1)


def _mend_streams() -> None:
    """A stream that is closed, or lacks a letter of a file's name, must not make a failure of work that is done."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - for the whole process
        elif isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")

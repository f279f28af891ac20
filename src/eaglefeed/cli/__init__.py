"""The command line: one short file a command."""

from eaglefeed.cli.app import main

__all__ = ["main"]

"""The token of everything that listens."""

from pathlib import Path

from eaglefeed.errors import ConfigError

__all__ = ["read_token"]

_MIN_TOKEN = 16


def read_token(path: Path) -> str:
    """The token that a file holds.

    Raises:
        ConfigError: it cannot be read, or the token is too short.
    """
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise ConfigError("token file cannot be read", subject=str(path), got=reason) from None
    if len(token) < _MIN_TOKEN:
        wanted, got = f"at least {_MIN_TOKEN} characters", f"{len(token)}"
        raise ConfigError("token too short", subject=str(path), wanted=wanted, got=got)
    return token

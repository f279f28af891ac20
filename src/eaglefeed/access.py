"""The token of everything that listens."""

import ipaddress
import socket
from pathlib import Path

from eaglefeed.errors import ConfigError

__all__ = ["bearer", "check_listen", "is_loopback", "loopback_of", "read_token"]

_MIN_TOKEN = 16
_LOCAL_NAMES = {"localhost", "ip6-localhost"}


def read_token(path: Path) -> str:
    """The token that a file holds.

    Raises:
        ConfigError: it cannot be read, or the token is too short.
    """
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        fix = "set access.token_file to a file that this user can read"
        raise ConfigError("token file cannot be read", subject=str(path), got=reason, fix=fix) from None
    if len(token) < _MIN_TOKEN:
        wanted, got = f"at least {_MIN_TOKEN} characters", f"{len(token)}"
        fix = "make another: openssl rand -hex 24"
        raise ConfigError("token too short", subject=str(path), wanted=wanted, got=got, fix=fix)
    return token


def bearer(token: str) -> str:
    """The value of the authorization header.

    Raises:
        ConfigError: a token that no header can carry.
    """
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise ConfigError("unusable token", wanted="printable ASCII without spaces", fix="make another token")
    return f"Bearer {token}"


def check_listen(host: str, token: str) -> None:
    """Check that nobody else can reach what asks for no token.

    Raises:
        ConfigError: it listens beyond this machine without one; or an unusable one.
    """
    if token:
        bearer(token)
    elif not is_loopback(host):
        fix = "set access.token_file, or listen on 127.0.0.1"
        raise ConfigError("would listen beyond this machine without a token", subject=host, fix=fix)


def is_loopback(host: str) -> bool:
    """Whether it says by itself that it is this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in _LOCAL_NAMES


def loopback_of(name: str) -> str:
    """The loopback address that a machine's name stands for here; "" where it stands for another one, or for none.

    Debian's /etc/hosts says 127.0.1.1, clones of one machine and some containers 127.0.0.1.
    """
    try:
        found = [str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError):
        return ""
    return found[0] if all(is_loopback(address) for address in found) else ""

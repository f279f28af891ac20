"""A server's address, and the secrets that come with it: checked, and never shown."""

import re
import ssl
from pathlib import Path
from urllib.parse import urlsplit

from eaglefeed.errors import ConfigError

__all__ = ["address_of", "check_authority", "has_password", "read_password"]

_SCHEMES = ("redis", "rediss", "unix")
_USERINFO = re.compile(r"(?:[A-Za-z0-9._~!$&'()*+,;=:-]|%[0-9A-Fa-f]{2})*")
_DATABASE = re.compile(r"(/[0-9]*)?")


def address_of(url: str) -> str:
    """The URL without user, password and options.

    Raises:
        ConfigError: another scheme, no number of a database, or a password with characters that a URL cannot hold.
    """
    scheme, separator, rest = url.partition("://")
    if scheme not in _SCHEMES or not separator:
        wanted = ", ".join(f"{known}://…" for known in _SCHEMES)
        raise ConfigError("not a server's URL", subject=scheme if separator else "", wanted=wanted)
    userinfo, has_user, place = ("", "", rest) if rest.startswith("/") else rest.rpartition("@")
    if has_user and not _USERINFO.fullmatch(userinfo):
        fix = "percent-encode it, such as %2F for /, or use a password file"
        raise ConfigError("the URL's password holds a reserved character", subject=f"{scheme}://…", fix=fix)
    try:
        parts = urlsplit(f"{scheme}://{place}")
    except ValueError as error:
        raise ConfigError("not a server's URL", subject=f"{scheme}://…", got=error) from None
    address = f"{scheme}://{parts.netloc}{parts.path}"
    if scheme != "unix" and not _DATABASE.fullmatch(parts.path):
        raise ConfigError("not a server's URL", subject=address, wanted="the number of a database as its path")
    return address


def has_password(url: str) -> bool:
    """Whether it stands in the URL, before the host or as an option."""
    rest, _, options = url.partition("://")[2].partition("?")
    userinfo = "" if rest.startswith("/") else rest.rpartition("@")[0]
    return ":" in userinfo or "password=" in options


def check_authority(address: str, path: str | Path) -> str:
    """The path of a certificate, if it protects something and can be used.

    Raises:
        ConfigError: an address without TLS, or a file that is no certificate.
    """
    if not address.startswith("rediss://"):
        raise ConfigError("no TLS to check a certificate for", subject=address, wanted="rediss://…")
    try:
        ssl.create_default_context(cafile=path)
    except OSError as error:
        raise ConfigError("certificate cannot be read", subject=str(path), got=error.strerror or error) from None
    return str(path)


def read_password(path: Path) -> str:
    """The password that a file holds, without the line's end.

    Raises:
        ConfigError: it cannot be read, or is empty.
    """
    try:
        secret = path.read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        fix = "set queue.password_file to a file that this user can read"
        raise ConfigError("password file cannot be read", subject=str(path), got=reason, fix=fix) from None
    if not secret:
        raise ConfigError("password file is empty", subject=str(path), fix="write the password into it")
    return secret

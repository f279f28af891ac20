"""A server's address, and the secrets that come with it: checked, and never shown."""

import re
import ssl
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from eaglefeed.errors import ConfigError

__all__ = ["address_of", "check_authority", "has_password", "read_password"]

_SCHEMES = ("redis", "rediss", "unix")
_USERINFO = re.compile(r"(?:[A-Za-z0-9._~!$&'()*+,;=:-]|%[0-9A-Fa-f]{2})*")
_OPTIONS = ("db", "username", "password", "client_name")
"""What a URL may say beside its place: the rest of a connection is the client's own, such as its timeouts."""
_RESERVED = "the URL's password holds a reserved character"
_ENCODE = "percent-encode it, such as %2F for /, or use a password file (queue.password_file)"
_DATABASE = re.compile(r"(/[0-9]*)?")


def address_of(url: str) -> str:
    """The URL without user, password and options.

    Raises:
        ConfigError: another scheme, no host, no number of a database, an option that is the client's own, or a password
            with characters that a URL cannot hold.
    """
    scheme, separator, rest = url.partition("://")
    if scheme not in _SCHEMES or not separator:
        wanted = ", ".join(f"{known}://…" for known in _SCHEMES)
        raise ConfigError("not a server's URL", subject=scheme if separator else "", wanted=wanted)
    userinfo, has_user, place = ("", "", rest) if rest.startswith("/") else rest.rpartition("@")
    if has_user and not _USERINFO.fullmatch(userinfo):
        raise ConfigError(_RESERVED, subject=f"{scheme}://…", fix=_ENCODE)
    if found := re.search(r"[\x00-\x1f#]", place):  # urlsplit would leave it out, or what follows it
        what = f"the URL holds a character that must be percent-encoded: {found[0]!r}"
        raise ConfigError(what, subject=f"{scheme}://…", fix=f"write %{ord(found[0]):02X}, or remove it")
    try:
        parts = urlsplit(f"{scheme}://{place}")
        _ = parts.port if scheme != "unix" else None  # tells whether it is a number
    except ValueError as error:
        raise ConfigError("not a server's URL", subject=f"{scheme}://…", got=error) from None
    address = f"{scheme}://{parts.netloc}{parts.path}"
    _check_place(scheme, parts, address)
    return address


def _check_place(scheme: str, parts: SplitResult, address: str) -> None:
    if scheme != "unix" and not _DATABASE.fullmatch(parts.path):
        raise ConfigError("not a server's URL", subject=address, wanted="the number of a database as its path")
    is_somewhere = parts.path if scheme == "unix" else parts.hostname and parts.port != 0
    if not is_somewhere:  # redis-py would take this machine's default
        wanted = "the path of a socket" if scheme == "unix" else "a host's name, and a port or none"
        raise ConfigError("not a server's URL", subject=address, wanted=wanted)
    for option in filter(None, parts.query.split("&")):
        name, _, value = option.partition("=")
        if name not in _OPTIONS and not (scheme == "rediss" and name.startswith("ssl_")):
            wanted = f"no other options than {', '.join(_OPTIONS)}, and ssl_… for rediss://"
            raise ConfigError("not a server's URL", subject=address, wanted=wanted, got=ascii(name[:40]))
        if name in ("username", "password") and ("+" in value or "%" in unquote(value)):  # which would be read twice
            raise ConfigError(_RESERVED, subject=address, fix=_ENCODE)


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

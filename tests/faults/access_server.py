"""A server whose users are those of the ACL file and an administrator, on a port, a TLS port and a socket."""

import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import trustme

import queue_servers
from eaglefeed.queue import connect
from eaglefeed.queue.connection import QueueClient

ROOT = Path(__file__).parents[2]
TEMPLATE = (ROOT / "deploy" / "users.acl.template").read_text(encoding="ascii")
SERVERS = queue_servers.real_servers()
RIGHTS = TEMPLATE.split("resetchannels ")[1].split()


class Server(NamedTuple):
    """Where it is, and its administrator's connection."""

    kind: str
    port: int
    tls_port: int | None
    folder: Path
    admin: QueueClient

    @property
    def url(self) -> str:
        return f"redis://eaglefeed@127.0.0.1:{self.port}/0"

    def user(self, **options: Any) -> QueueClient:
        return connect(self.url, password="word", max_wait_s=2.0, **options)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def certificates(folder: Path) -> list[str]:
    """A server's certificate with its authority's, and another authority's."""
    authority = trustme.CA()
    issued = authority.issue_cert("localhost")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    trustme.CA().cert_pem.write_to_path(folder / "other-ca.pem")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    issued.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    files = {"ca-cert-file": "ca.pem", "cert-file": "cert.pem", "key-file": "key.pem"}
    return [f'tls-{name} "{folder}/{file}"' for name, file in files.items()] + ["tls-auth-clients no"]


def has_tls(binary: str) -> bool:
    """Whether a server was built with TLS: then it names what it misses for it."""
    told = subprocess.run([binary, "--port", "0", "--tls-port", "1"], capture_output=True, text=True, timeout=20)
    return "No tls-cert-file configured" in told.stdout


@contextmanager
def started(kind: str, folder: Path) -> Iterator[Server]:
    port, tls_port = free_port(), free_port() if has_tls(SERVERS[kind]) else None
    users = [*TEMPLATE.replace("PASSWORD", "word").splitlines(), "user admin reset on >root ~* &* +@all"]
    (folder / "users.acl").write_text("".join(f"{line}\n" for line in users), encoding="ascii")
    socket_path = folder / "server.sock"
    lines = [f"port {port}", "bind 127.0.0.1 -::1", f'dir "{folder}"', f'aclfile "{folder}/users.acl"']
    lines += [f'unixsocket "{socket_path}"', 'save ""', "appendonly yes", "maxmemory-policy noeviction"]
    if tls_port is not None:
        lines += [f"tls-port {tls_port}", *certificates(folder)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([SERVERS[kind], "-"], stdin=subprocess.PIPE, stdout=log, stderr=log)
    try:
        assert process.stdin is not None
        process.stdin.write("\n".join(lines).encode())
        process.stdin.close()
        admin = connect(f"unix://{quote(str(socket_path))}?username=admin&password=root", max_wait_s=20.0)
        yield Server(kind, port, tls_port, folder, admin)
        admin.close()
    finally:
        process.kill()
        process.wait()

"""The services of docker-compose.yml as processes of this machine, and what others can see of them."""

import json
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).parents[1]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
DEADLINE_S = 100.0
_LOOK_S = 0.1


def interpolate(value: Any, variables: dict[str, str]) -> Any:
    """What compose makes of ${NAME:-default} and $$."""
    if isinstance(value, dict):
        return {key: interpolate(each, variables) for key, each in value.items()}
    if isinstance(value, list):
        return [interpolate(each, variables) for each in value]
    if not isinstance(value, str):
        return value
    found = re.compile(r"\$(?:(\$)|\{(\w+):-([^}]*)\})")
    return found.sub(lambda match: match[1] or variables.get(match[2]) or match[3], value)


def entrypoint() -> list[str]:
    words: list[str] = json.loads(re.search(r"^ENTRYPOINT (\[.*\])$", DOCKERFILE, re.MULTILINE)[1])  # type: ignore[index]
    return words


def target_of(volume: str | dict[str, Any]) -> str:
    return volume["target"] if isinstance(volume, dict) else volume.split(":")[1]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


class Running(NamedTuple):
    """A process, the port of its metrics, and where its output goes."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def output(self) -> str:
        return self.log.read_text(errors="replace")


class LocalRun:
    """Runs services without containers: their paths lie below a folder, their ports are free ones of this machine.

    Args:
        folder: does not exist yet.
        variables: of the compose file.
    """

    def __init__(self, folder: Path, variables: dict[str, str]) -> None:
        self.folder, self.services = folder, interpolate(SERVICES, variables)
        self.started: list[Running] = []
        self.leaks: list[str] = []
        volumes = [volume for service in self.services.values() for volume in service["volumes"]]
        targets = {target_of(volume) for volume in volumes} | {"/run/secrets"}
        self.paths = {target: str(folder / target.lstrip("/")) for target in targets}
        self.port, self.server_port = free_port(), free_port()
        self._make_places(volumes)
        self.secrets = {name: self.secret(name).read_text().strip() for name in COMPOSE["secrets"]}

    def _make_places(self, volumes: list[str | dict[str, Any]]) -> None:
        for name in ("bin", "home", "tmp"):
            (self.folder / name).mkdir(parents=True)
        for volume in volumes:
            place = Path(self.paths[target_of(volume)])
            if isinstance(volume, str):
                place.mkdir(parents=True, exist_ok=True)
            elif (source := ROOT / volume["source"]).is_file():
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, place)
        subprocess.run([ROOT / "deploy" / "make-secrets", self.paths["/run/secrets"]], check=True)
        self._wrap("eaglefeed", f'"{sys.executable}" -m eaglefeed')
        self._wrap("python", sys.executable)
        for program in ("redis-server", "redis-cli"):
            self._wrap(program, str(shutil.which(program)))

    def _wrap(self, name: str, words: str) -> None:
        """A program that notes what it is given, since some rewrite their command line at once."""
        program = self.folder / "bin" / name
        noted = f'{{ echo {name} "$@"; env; }} >>"{self.folder}/given"'
        program.write_text(f'#!/bin/sh\n{noted}\nexec {words} "$@"\n', encoding="utf-8")
        program.chmod(0o755)

    def secret(self, name: str = "redis_password") -> Path:
        return self.folder / "run" / "secrets" / name

    def _here(self, text: str, metrics_port: int) -> str:
        """What a container sees as its own file system and network, as this machine has it."""
        words = {
            **self.paths,
            "port 6379": f"bind 127.0.0.1\nport {self.port}",
            "-p 6379": f"-p {self.port}",
            "redis:6379": f"127.0.0.1:{self.port}",
            "target-server:8001": f"127.0.0.1:{self.server_port}",
            "8001": str(self.server_port),
            "9464": str(metrics_port),
        }
        longest_first = sorted(words, key=len, reverse=True)
        return re.sub(rf"(?:{'|'.join(map(re.escape, longest_first))})\b", lambda found: words[found[0]], text)

    def start(self, service: str, command: list[str] | None = None, **environment: str) -> Running:
        """Start a service's command, or another one in its place."""
        words = command or self.services[service]["command"]
        is_ours = "build" in self.services[service]
        return self._start(service, [*entrypoint(), *words] if is_ours else words, free_port(), environment)

    def _start(self, service: str, words: list[str], port: int, environment: dict[str, str]) -> Running:
        given = self.services[service].get("environment", {})
        log = self.folder / f"{len(self.started)}-{service}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [self._here(word, port) for word in words],
                env={
                    "PATH": f"{self.folder}/bin:/usr/local/bin:/usr/bin:/bin",
                    "TMPDIR": str(self.folder / "tmp"),
                    "OMP_NUM_THREADS": "1",
                    **{name: self._here(str(value), port) for name, value in given.items()},
                    **environment,
                },
                cwd=self.folder / "home",
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started.append(Running(process, port, log))
        self.look()
        return self.started[-1]

    def finish(self, running: Running) -> int:
        """Wait for the end, watching what others can see of the processes."""
        end = time.monotonic() + DEADLINE_S
        while running.process.poll() is None:
            assert time.monotonic() < end, self.outputs()
            self.look()
            time.sleep(_LOOK_S)
        return running.process.returncode

    def run(self, service: str, command: list[str] | None = None, **environment: str) -> int:
        return self.finish(self.start(service, command, **environment))

    def check(self, service: str = "redis", of: Running | None = None, **environment: str) -> int:
        """A service's health check, as it is run beside a process of it."""
        kind, *words = self.services[service]["healthcheck"]["test"]
        words = ["/bin/sh", "-c", *words] if kind == "CMD-SHELL" else words
        return self.finish(self._start(service, words, of.port if of else 0, environment))

    def wait_until_healthy(self, service: str, running: Running) -> None:
        """Wait until the health check passes; it must before the process ends."""
        end = time.monotonic() + DEADLINE_S
        while self.check(service, running) != 0:
            assert running.process.poll() is None, self.outputs()
            assert time.monotonic() < end, self.outputs()
            time.sleep(_LOOK_S)

    def look(self) -> None:
        """Note each process whose command line or environment shows a secret."""
        for entry in Path("/proc").glob("[0-9]*"):
            for name in ("cmdline", "environ"):
                try:
                    shown = (entry / name).read_bytes()
                except OSError:  # ended, or another user's
                    continue
                self.leaks += [
                    f"{name} of {shown[:80]!r}" for secret in self.secrets.values() if secret.encode() in shown
                ]

    def given(self) -> str:
        """Words and environment of each program that was started."""
        return (self.folder / "given").read_text()

    def outputs(self) -> str:
        return "\n".join(running.output() for running in self.started)

    def last_output(self) -> str:
        return self.started[-1].output()

    def stop(self) -> None:
        """End what runs, each process with its children."""
        for running in self.started:
            if running.process.poll() is None:
                subprocess.run(["kill", "-KILL", "--", f"-{running.process.pid}"], check=False, capture_output=True)
                running.process.wait()

"""The services of docker-compose.yml as processes of this machine, and what others can see of them."""

import json
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
DEADLINE_S = 100.0


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


class LocalRun:
    """Runs services without containers: their paths lie below a folder, `redis:6379` is a free port of this machine."""

    def __init__(self, folder: Path, variables: dict[str, str]) -> None:
        self.folder, self.services = folder, interpolate(SERVICES, variables)
        self.password = secrets.token_hex(24)
        self.started: list[subprocess.Popen[bytes]] = []
        self.leaks: list[str] = []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        volumes = [volume for service in SERVICES.values() for volume in service["volumes"]]
        targets = [target_of(volume) for volume in volumes]
        self.paths = {target: str(folder / target.lstrip("/")) for target in (*targets, "/run/secrets")}
        self._make_places(volumes)

    def _make_places(self, volumes: list[str | dict[str, Any]]) -> None:
        Path(self.paths["/run/secrets"]).mkdir(parents=True)
        for volume in volumes:
            place = Path(self.paths[target_of(volume)])
            if isinstance(volume, str):
                place.mkdir(exist_ok=True)
            elif not volume["source"].startswith("$"):
                shutil.copy(ROOT / volume["source"], place)
        self.secret.write_text(self.password + "\n", encoding="ascii")
        (self.folder / "bin").mkdir()
        self._wrap("eaglefeed", f'"{sys.executable}" -m eaglefeed')
        for program in ("redis-server", "redis-cli"):
            self._wrap(program, str(shutil.which(program)))

    def _wrap(self, name: str, words: str) -> None:
        """A program that notes what it is given, since some rewrite their command line at once."""
        program = self.folder / "bin" / name
        noted = f'{{ echo {name} "$@"; env; }} >>"{self.folder}/given"'
        program.write_text(f'#!/bin/sh\n{noted}\nexec {words} "$@"\n', encoding="utf-8")
        program.chmod(0o755)

    @property
    def secret(self) -> Path:
        return self.folder / "run" / "secrets" / "redis_password"

    def _here(self, text: str) -> str:
        for target, path in self.paths.items():
            text = text.replace(target, path)
        text = text.replace("port 6379", f"bind 127.0.0.1\nport {self.port}").replace("-p 6379", f"-p {self.port}")
        return text.replace("redis:6379", f"127.0.0.1:{self.port}")

    def start(
        self, service: str, command: list[str] | None = None, path: str = "", **environment: str
    ) -> subprocess.Popen[bytes]:
        """Start a service's command, or another one in its place."""
        definition = self.services[service]
        words = [self._here(word) for word in command or definition["command"]]
        own = {name: self._here(str(value)) for name, value in definition.get("environment", {}).items()}
        with (self.folder / f"{len(self.started)}-{service}.log").open("wb") as log:
            process = subprocess.Popen(
                words if service == "redis" else [*entrypoint(), *words],
                env={
                    "PATH": f"{path}:{self.folder}/bin:/usr/local/bin:/usr/bin:/bin",
                    "HOME": str(self.folder),
                    "OMP_NUM_THREADS": "1",
                    **own,
                    **environment,
                },
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started.append(process)
        self.look()
        return process

    def finish(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for the end, watching what others can see of the processes."""
        end = time.monotonic() + DEADLINE_S
        while process.poll() is None:
            assert time.monotonic() < end, self.outputs()
            self.look()
            time.sleep(0.02)
        return process.returncode

    def run(self, service: str, command: list[str] | None = None, **environment: str) -> int:
        return self.finish(self.start(service, command, **environment))

    def check(self, path: str = "") -> int:
        """The redis service's health check, as its shell runs it."""
        kind, line = self.services["redis"]["healthcheck"]["test"]
        assert kind == "CMD-SHELL"
        return self.finish(self.start("redis", ["/bin/sh", "-c", line], path))

    def look(self) -> None:
        """Note each process whose command line or environment shows the password."""
        for entry in Path("/proc").glob("[0-9]*"):
            for name in ("cmdline", "environ"):
                try:
                    shown = (entry / name).read_bytes()
                except OSError:  # ended, or another user's
                    continue
                if self.password.encode() in shown:
                    self.leaks.append(f"{name} of {shown[:80]!r}")

    def given(self) -> str:
        """Words and environment of each program that was started."""
        return (self.folder / "given").read_text()

    def outputs(self) -> str:
        return "\n".join(log.read_text(errors="replace") for log in sorted(self.folder.glob("*.log")))

    def last_output(self) -> str:
        (log,) = self.folder.glob(f"{len(self.started) - 1}-*.log")
        return log.read_text()

    def stop(self) -> None:
        """End what runs, each process with its children."""
        for process in self.started:
            if process.poll() is None:
                subprocess.run(["kill", "-KILL", "--", f"-{process.pid}"], check=False, capture_output=True)
                process.wait()

"""docker-compose.yml: its promises, its syntax, and every service's command run as a process of this machine."""

import json
import re
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from compose_local import COMPOSE, DEADLINE_S, DOCKERFILE, ROOT, SERVICES, LocalRun, target_of
from tiny_target import tiny_model, tiny_tokenizer, turns

OURS = sorted(set(SERVICES) - {"redis"})
HEALTHY = {"condition": "service_healthy"}
NUM_CONVERSATIONS = 6


@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalRun]:
    if not shutil.which("redis-server") or not shutil.which("redis-cli"):
        pytest.skip("redis-server and redis-cli are not on PATH")
    target = tmp_path / "target"
    run = LocalRun(tmp_path / "root", {"TARGET": str(target), "RUN_ID": "compose-test"})
    try:
        yield run
    finally:
        run.stop()


def save_target(folder: Path) -> None:
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def save_conversations(path: Path) -> None:
    rows = [{"id": f"c{index}", "messages": turns(f"say {index}", "yes " * 4)} for index in range(NUM_CONVERSATIONS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def wait_until_healthy(run: LocalRun, redis: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + DEADLINE_S
    while run.check() != 0:
        assert redis.poll() is None, run.outputs()
        assert time.monotonic() < end, run.outputs()
        time.sleep(0.1)


def assert_nothing_shows_the_password(run: LocalRun) -> None:
    assert run.leaks == []
    assert "redis-server -\n" in run.given()
    assert run.password not in run.given()
    assert run.password not in run.outputs()


@pytest.mark.slow
def test_the_services_commands_carry_a_run_to_its_end(local: LocalRun, tmp_path: Path) -> None:
    save_target(tmp_path / "target")
    save_conversations(Path(local.paths["/conversations.jsonl"]))
    assert local.check() != 0, "nobody listens yet"
    redis = local.start("redis")
    wait_until_healthy(local, redis)

    assert local.run("feed") == 0, local.outputs()
    workers = [local.start(name) for name in ("producers", "producers", "consumers")]
    assert [local.finish(worker) for worker in workers] == [0, 0, 0], local.outputs()
    assert local.run("feed") == 0, "`up producers` starts the one-shot feed again: " + local.last_output()

    assert local.run("consumers", ["queue", "stats", "--json"]) == 0, local.last_output()
    stats = json.loads(local.last_output().splitlines()[-1])
    for queue in ("prompts", "samples"):
        assert stats[queue]["done"] == NUM_CONVERSATIONS
        assert stats[queue]["dead"] == stats[queue]["ready"] == stats[queue]["leased"] == 0

    assert list((local.folder / "output").glob("export-*/*.safetensors"))
    for path in (*(local.folder / "shards").rglob("*"), *(local.folder / "output").rglob("*")):
        wanted = 0o770 if path.is_dir() else 0o660
        assert stat.S_IMODE(path.stat().st_mode) & wanted == wanted, f"{path}: the group cannot share it"
    assert list((local.folder / "data").rglob("*.aof")), "the append-only file lies outside the volume"
    assert_nothing_shows_the_password(local)


def test_a_wrong_password_is_one_line_and_exit_code_2(local: LocalRun) -> None:
    wait_until_healthy(local, local.start("redis"))
    wrong = local.folder / "wrong"
    wrong.write_text("not-the-password\n", encoding="ascii")
    assert local.run("producers", ["queue", "stats"], EAGLEFEED_QUEUE__PASSWORD_FILE=str(wrong)) == 2
    (line,) = local.last_output().splitlines()
    assert line.startswith("eaglefeed: ")
    assert "not-the-password" not in line
    assert_nothing_shows_the_password(local)


def test_who_is_not_the_queues_user_may_nothing(local: LocalRun) -> None:
    wait_until_healthy(local, local.start("redis"))
    local.run("redis", ["/bin/sh", "-c", "redis-cli -p 6379 PING"])
    assert "NOAUTH" in local.last_output()
    told = local.run("consumers", ["queue", "stats"], EAGLEFEED_REDIS_URL=f"redis://127.0.0.1:{local.port}/0")
    assert told == 2, "the password alone is not the user's"
    local.secret.write_text("not-the-password\n", encoding="ascii")
    assert local.check() != 0
    assert_nothing_shows_the_password(local)


def test_a_server_that_still_loads_is_not_healthy(local: LocalRun) -> None:
    loading = local.folder / "loading"
    loading.mkdir()
    client = loading / "redis-cli"
    answer = "#!/bin/sh\ncat >/dev/null\nprintf 'OK\\n# Persistence\\r\\nloading:%s\\r\\n'\n"
    client.write_text(answer.replace("%s", "1"))
    client.chmod(0o755)
    assert local.check(str(loading)) != 0
    client.write_text(answer.replace("%s", "0"))
    assert local.check(str(loading)) == 0, "this test's client is not asked"


@pytest.mark.parametrize(
    "content", ["", "two words\n", "two\nlines\n", "quo'te\n"], ids=["empty", "blank", "lines", "quote"]
)
def test_a_password_that_breaks_the_configuration_is_refused_without_showing_it(local: LocalRun, content: str) -> None:
    local.secret.write_text(content, encoding="ascii")
    assert local.run("redis") == 1
    (line,) = local.last_output().splitlines()
    assert line.startswith("redis_password: ")
    assert not content or content.split("\n")[0] not in line


def test_compose_accepts_the_file_with_every_profile() -> None:
    programs = (["docker-compose"], ["docker", "compose"])
    program = next((each for each in programs if shutil.which(each[0]) and _works(each)), None)
    if program is None:
        pytest.skip("neither docker-compose nor docker compose is installed")
    for profile in ("", "cpu", "gpu"):
        told = subprocess.run(
            [*program, "-f", str(ROOT / "docker-compose.yml"), "config", "--quiet"],
            env={"PATH": "/usr/local/bin:/usr/bin:/bin", "COMPOSE_PROFILES": profile},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (told.returncode, told.stderr) == (0, ""), profile


def _works(program: list[str]) -> bool:
    return subprocess.run([*program, "version"], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("name", list(SERVICES))
def test_every_service_is_confined_and_gets_time_to_stop(name: str) -> None:
    service = SERVICES[name]
    assert str(service["user"]).split(":")[0] not in {"0", "root", ""}
    assert "ports" not in service
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["init"] is True
    assert "stop_grace_period" in service
    assert "shm_size" in service or name == "redis"


def test_the_password_is_a_secret_file_and_in_no_environment() -> None:
    assert COMPOSE["secrets"] == {"redis_password": {"file": "./secrets/redis_password"}}
    assert "secrets/" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    for service in SERVICES.values():
        assert service["secrets"] == ["redis_password"]
        names = [name for name in service.get("environment", {}) if "PASSWORD" in name or "AUTH" in name]
        assert set(names) <= {"EAGLEFEED_QUEUE__PASSWORD_FILE"}
        assert service.get("environment", {}).get("EAGLEFEED_REDIS_URL") in {None, "redis://eaglefeed@redis:6379/0"}


def test_upping_producers_or_consumers_brings_what_they_need() -> None:
    fed = {"redis": HEALTHY, "feed": {"condition": "service_completed_successfully"}}
    assert SERVICES["feed"]["depends_on"] == {"redis": HEALTHY}
    assert SERVICES["producers"]["depends_on"] == SERVICES["producers-gpu"]["depends_on"] == fed
    assert SERVICES["consumers"]["depends_on"] == SERVICES["consumers-gpu"]["depends_on"] == {"redis": HEALTHY}
    for name in ("redis", "feed", "producers", "consumers"):
        assert "profiles" not in SERVICES[name]


def test_only_gpu_services_reserve_a_gpu_and_they_wait_for_their_profile() -> None:
    for name, service in SERVICES.items():
        assert ("deploy" in service) == ("profiles" in service) == name.endswith("-gpu")
    (device,) = SERVICES["producers-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]


def test_redis_keeps_what_it_is_given() -> None:
    redis = SERVICES["redis"]
    settings = redis["command"][-1].splitlines()
    assert redis["image"] == "redis:8.2-alpine"
    assert {"appendonly yes", "maxmemory-policy noeviction", "dir /data"} <= set(settings)
    assert "queue:/data" in redis["volumes"]
    assert "healthcheck" in redis


def test_every_named_volume_has_a_folder_of_the_image_that_the_user_owns() -> None:
    made = re.search(r"install -d -o 1000 -g 1000 -m 2775 (.*)$", DOCKERFILE, re.MULTILINE)[1].split()  # type: ignore[index]
    used = [volume for name in OURS for volume in SERVICES[name]["volumes"] if isinstance(volume, str)]
    assert {target_of(volume) for volume in used} == set(made)
    assert {volume.split(":")[0] for volume in used} | {"queue"} == set(COMPOSE["volumes"])
    assert all("shards:/shards" in SERVICES[name]["volumes"] for name in OURS)
    assert {SERVICES[name]["user"] for name in OURS} == {"1000:1000"}
    assert "USER 1000:1000" in DOCKERFILE.splitlines()

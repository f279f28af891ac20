"""docker-compose.yml and the files beside it: their promises and their syntax. test_compose_run.py runs them."""

import os
import re
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from compose_local import COMPOSE, DOCKERFILE, ROOT, SERVICES, interpolate, target_of
from eaglefeed.config import load_settings

OURS = [name for name, service in SERVICES.items() if "build" in service]
WORKERS = [name for name in OURS if name != "feed"]
HEALTHY, COMPLETED = {"condition": "service_healthy"}, {"condition": "service_completed_successfully"}
PROFILES = ["cpu", "gpu", "monitoring", "remote"]


def brought_up(profile: str = "", service: str = "") -> set[str]:
    """What compose starts for a profile, or for a service: what stands without a profile is there for both."""
    chosen = [profile, *SERVICES[service].get("profiles", [])] if service else [profile]
    enabled = {name for name, each in SERVICES.items() if not each.get("profiles") or set(each["profiles"]) & {*chosen}}
    found = {service} if service else set(enabled)
    while more := {need for name in found for need in SERVICES[name].get("depends_on", {})} - found:
        assert more <= enabled, "compose refuses a service whose dependency is in no chosen profile"
        found |= more
    return found


@pytest.mark.parametrize(
    ("profile", "wanted"),
    [
        ("", {"redis", "feed"}),
        ("cpu", {"redis", "feed", "producers", "consumers"}),
        ("gpu", {"redis", "feed", "producers-gpu", "consumers-gpu"}),
        ("monitoring", {"redis", "feed", "prometheus", "grafana"}),
        ("remote", {"redis", "feed", "target-server", "consumers-remote"}),
    ],
)
def test_a_profile_brings_up_all_of_its_run(profile: str, wanted: set[str]) -> None:
    assert brought_up(profile) == wanted


@pytest.mark.parametrize(
    ("service", "wanted"),
    [
        ("producers", {"redis", "feed", "producers"}),
        ("producers-gpu", {"redis", "feed", "producers-gpu"}),
        ("consumers", {"redis", "consumers"}),
        ("consumers-gpu", {"redis", "consumers-gpu"}),
        ("consumers-remote", {"target-server", "consumers-remote"}),
    ],
)
def test_a_named_service_brings_up_what_it_needs(service: str, wanted: set[str]) -> None:
    assert brought_up(service=service) == wanted


def test_compose_accepts_the_file_with_every_profile() -> None:
    programs = (["docker-compose"], ["docker", "compose"])
    program = next((each for each in programs if shutil.which(each[0]) and _works(each)), None)
    if program is None:
        pytest.skip("neither docker-compose nor docker compose is installed")
    started = {
        profile: subprocess.Popen(
            [*program, "-f", str(ROOT / "docker-compose.yml"), "config", "--quiet"],
            env={"PATH": "/usr/local/bin:/usr/bin:/bin", "COMPOSE_PROFILES": profile},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for profile in ("", ",".join(PROFILES))
    }
    told = {profile: process.communicate(timeout=60)[1] for profile, process in started.items()}
    assert told == dict.fromkeys(told, "")
    assert {process.returncode for process in started.values()} == {0}


def _works(program: list[str]) -> bool:
    return subprocess.run([*program, "version"], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("name", list(SERVICES))
def test_every_service_is_confined_and_gets_time_to_stop(name: str) -> None:
    service = SERVICES[name]
    assert str(service["user"]).split(":")[0] not in {"0", "root", ""}
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["init"] is True
    assert service["read_only"] is True
    assert service["tmpfs"] == ["/tmp"]
    assert service["stop_grace_period"] in {"1m", "2m"}
    assert ("shm_size" in service) == (name in OURS)
    assert {"max-size", "max-file"} <= set(service["logging"]["options"]), "a week's log fills the disk"


def test_shared_memory_has_a_size_for_trainers_and_targets_and_no_store_lies_there_by_itself() -> None:
    for name in ("producers", "producers-gpu", "consumers", "consumers-gpu", "consumers-remote", "target-server"):
        assert SERVICES[name]["shm_size"] == "1gb", "docker's own 64 MB are too little for NCCL"
        assert SERVICES[name]["environment"]["EAGLEFEED_STORE__URI"].startswith("file:///shards")
    assert load_settings().store_uri.startswith("file:///")
    assert "/dev/shm" not in load_settings().store_uri


@pytest.mark.parametrize("name", list(SERVICES))
def test_what_is_published_is_published_to_this_machine_alone(name: str) -> None:
    ports = interpolate(SERVICES[name].get("ports", []), {})
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert (ports == []) == (name != "grafana"), "a fixed port keeps a service from being scaled"
    assert "container_name" not in SERVICES[name]


def test_all_but_the_one_shot_feed_tell_their_health_and_come_back() -> None:
    for name in sorted(set(SERVICES) - {"feed"}):
        assert SERVICES[name]["healthcheck"]["test"][0] in {"CMD", "CMD-SHELL"}
        assert SERVICES[name]["restart"] == ("on-failure:10" if name in WORKERS else "unless-stopped")
    assert "restart" not in SERVICES["feed"]
    assert "HEALTHCHECK NONE" in DOCKERFILE.splitlines()


def test_dependencies_are_waited_for_until_they_can_be_used() -> None:
    for service in SERVICES.values():
        for needed, condition in service.get("depends_on", {}).items():
            assert condition == (COMPLETED if needed == "feed" else HEALTHY)


def test_secrets_are_files_and_in_no_environment() -> None:
    assert COMPOSE["secrets"] == {name: {"file": f"./secrets/{name}"} for name in COMPOSE["secrets"]}
    assert "secrets/" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    secret = re.compile("PASSWORD|TOKEN|AUTH|SECRET|KEY")
    for service in SERVICES.values():
        values = {name: value for name, value in service.get("environment", {}).items() if secret.search(name)}
        assert all(re.fullmatch(r"(\$\$__file\{)?/run/secrets/\w+\}?", str(value)) for value in values.values())
        assert service.get("environment", {}).get("EAGLEFEED_REDIS_URL") in {None, "redis://eaglefeed@redis:6379/0"}


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["redis"], {"redis_password"}),
        (["grafana"], {"grafana_password"}),
        (["prometheus", "target-server", "consumers-remote"], {"access_token"}),
        (["feed", "producers", "consumers", "producers-gpu", "consumers-gpu"], {"redis_password", "access_token"}),
    ],
)
def test_a_service_gets_the_secrets_that_it_needs_and_no_others(names: list[str], wanted: set[str]) -> None:
    assert [set(SERVICES[name]["secrets"]) for name in names] == [wanted] * len(names)


def test_secrets_are_made_once_and_only_their_owner_enters_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    make = [ROOT / "deploy" / "make-secrets", folder]
    old = os.umask(0o077)
    try:
        subprocess.run(make, check=True)
    finally:
        os.umask(old)
    made = {path.name: path.read_text() for path in folder.iterdir()}
    assert set(made) == set(COMPOSE["secrets"])
    assert all(re.fullmatch("[0-9a-f]{48}", text) for text in made.values())
    assert len(set(made.values())) == len(made)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o644}, "containers' users read them"
    (folder / "access_token").write_text("")
    subprocess.run(make, check=True)
    again = {path.name: path.read_text() for path in folder.iterdir()}
    assert {name for name in made if again[name] != made[name]} == {"access_token"}, "an empty one is none"


def test_only_gpu_services_reserve_a_gpu() -> None:
    for name, service in SERVICES.items():
        assert ("deploy" in service) == name.endswith("-gpu")
    (device,) = SERVICES["producers-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]


def test_redis_keeps_what_it_is_given() -> None:
    redis = SERVICES["redis"]
    settings = redis["command"][-1].splitlines()
    assert redis["image"] == "redis:8.2-alpine"
    assert {"appendonly yes", "maxmemory-policy noeviction", "dir /data"} <= set(settings)
    assert "queue:/data" in redis["volumes"]


def test_every_image_is_pinned() -> None:
    for service in SERVICES.values():
        assert re.fullmatch(r"[a-z/-]+:(v?\d+\.\d+[\w.-]*|cpu|cuda)", service["image"])
    bases = [line.split()[1] for line in DOCKERFILE.splitlines() if line.startswith("FROM ")]
    assert [base for base in bases if base != "base"] == ["python:3.12.12-slim-bookworm"]


def test_the_image_has_a_target_for_each_build_and_ends_as_a_user_without_rights() -> None:
    stages = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]
    named = {stage.split()[2]: _instructions(stage) for stage in stages}
    assert [*named] == ["base", "wheel", "cuda", "cpu"], "a build without a target makes the last one"
    for name in OURS:
        target, image = SERVICES[name]["build"]["target"], SERVICES[name]["image"]
        assert image == f"eaglefeed:{target}" == f"eaglefeed:{'cuda' if name.endswith('-gpu') else 'cpu'}"
        assert named[target][-1] == "USER 1000:1000"
        assert all(f"ARG {variable}=" in named[target] for variable in SERVICES[name]["build"]["args"])
    assert named["cpu"] == [line.replace("TORCH_INDEX_CUDA", "TORCH_INDEX") for line in named["cuda"]]


def _instructions(stage: str) -> list[str]:
    return [line for line in stage.splitlines()[1:] if line and not line.startswith("#")]


def test_what_the_image_copies_is_there_and_not_ignored() -> None:
    copied = [
        path for line in re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE) for path in line.split()
    ]
    let_in = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert let_in[1] == "*", "nothing but what is named"
    assert {f"!{path}" for path in copied} == {line for line in let_in if line.startswith("!")}
    assert all((ROOT / path).exists() for path in copied)


def test_every_named_volume_has_a_folder_of_the_image_that_the_user_owns() -> None:
    made = re.search(r"install -d -o 1000 -g 1000 -m 2775 (.*)$", DOCKERFILE, re.MULTILINE)[1].split()  # type: ignore[index]
    volumes = {name: [each for each in SERVICES[name]["volumes"] if isinstance(each, str)] for name in SERVICES}
    assert {target_of(volume) for name in OURS for volume in volumes[name]} == set(made)
    assert {volume.split(":")[0] for each in volumes.values() for volume in each} == set(COMPOSE["volumes"])
    assert all({"shards:/shards", "runs:/runs", "cache:/cache"} == set(volumes[name]) for name in OURS)
    assert {SERVICES[name]["user"] for name in OURS} == {"1000:1000"}


def test_every_file_that_is_mounted_is_there_and_read_only() -> None:
    mounts = [each for service in SERVICES.values() for each in service["volumes"] if isinstance(each, dict)]
    for mount in interpolate(mounts, {}):
        assert (ROOT / mount["source"]).exists(), mount
        assert mount["read_only"] is True


def test_prometheus_scrapes_the_services_where_they_show_their_metrics() -> None:
    config: dict[str, Any] = yaml.safe_load((ROOT / "deploy/monitoring/prometheus.yml").read_text(encoding="utf-8"))
    jobs = [job for job in config["scrape_configs"] if "dns_sd_configs" in job]
    found = {(name, each["port"]) for job in jobs for each in job["dns_sd_configs"] for name in each["names"]}
    assert found == {(name, 8001 if name == "target-server" else 9464) for name in WORKERS}
    assert {job["authorization"]["credentials_file"] for job in jobs} == {"/run/secrets/access_token"}


def test_grafana_finds_its_dashboards_and_prometheus_where_they_are() -> None:
    mount = next(each for each in SERVICES["grafana"]["volumes"] if isinstance(each, dict))
    folder = ROOT / mount["source"]
    provided = yaml.safe_load((folder / "dashboards" / "provider.yml").read_text(encoding="utf-8"))["providers"]
    assert [each["options"]["path"] for each in provided] == [f"{mount['target']}/dashboards"]
    assert (folder / "dashboards" / "eaglefeed.json").is_file()
    (source,) = yaml.safe_load((folder / "datasources" / "prometheus.yml").read_text(encoding="utf-8"))["datasources"]
    assert source["url"] == "http://prometheus:9090"

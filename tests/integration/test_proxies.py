"""Proxy variables of a machine: what is ours, and near, is reached past them."""

import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import peers
import s3_server
import samples
from coded_target import CodedTarget, check_answer, row
from compose_local import SERVICES
from eaglefeed.cli.bench_observation import _scrape
from eaglefeed.ops.doctor_servers import examine_servers
from eaglefeed.ops.exporter import METRICS_PATH, exporting
from eaglefeed.storage.base import open_store
from eaglefeed.storage.bucket import _past_proxies
from http_sides import App
from http_sides import serving as serving_app
from remote_models import closing
from target_servers import serving

NAMES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
TOKEN = "0123456789abcdef"


@pytest.fixture(params=["http", "socks5"])
def asked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """Connections to the proxy that every variable names, which answers nothing; none is exempted."""
    listener, seen = socket.create_server(("127.0.0.1", 0)), list[object]()

    def take() -> None:
        while True:
            try:
                connection, address = listener.accept()
            except OSError:
                return
            seen.append(address)
            connection.close()

    thread = threading.Thread(target=take)
    thread.start()
    for name in NAMES:
        for each in (name, name.lower()):
            monkeypatch.setenv(each, f"{request.param}://127.0.0.1:{listener.getsockname()[1]}")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "")
    yield seen
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(10)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_target_server_is_asked_directly(host: str, asked: list[object]) -> None:
    with serving(CodedTarget()) as server:
        port = server.url.rpartition(":")[2]
        with closing(f"http://{host}:{port}", max_retries=0) as model:
            check_answer(model.generate_batch(*row(1, 2)).tensors(), torch.tensor([[1, 2]]))
    assert asked == []


def test_the_doctor_asks_directly(asked: list[object]) -> None:
    with serving(CodedTarget()) as server:
        (found,) = examine_servers([server.url], "")
    assert found.status == "ok", found
    assert asked == []


def test_a_producer_that_keeps_its_samples_is_asked_directly(asked: list[object]) -> None:
    with peers.keeping() as producer, peers.pulling() as trainer:
        found = trainer.get(peers.put(producer, seed=3))
    wanted = samples.tensors(seed=3)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    assert asked == []


def test_metrics_are_read_directly(asked: list[object]) -> None:
    stop, texts = threading.Event(), list[bytes]()

    def text() -> bytes:
        texts.append(b"eaglefeed_up 1\n")
        stop.set()
        return texts[-1]

    with exporting(text, host="127.0.0.1", port=0) as exporter:
        _scrape(exporter.url + METRICS_PATH, stop)
    assert len(texts) == 1
    assert asked == []


def test_a_bucket_of_this_machine_is_reached_directly(
    asked: list[object], s3: s3_server.S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3_server.use(monkeypatch, s3.address)
    store = open_store(f"s3://{s3.new_bucket()}/{s3_server.PREFIX}")
    assert store.put_document("a.json", b"{}")
    assert store.get_document("a.json") == b"{}"
    store.close()
    assert asked == []


@pytest.mark.parametrize(
    ("variables", "is_past"),
    [
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9000"}, True),
        ({"AWS_ENDPOINT_URL": "http://[::1]:9000"}, True),
        ({"AWS_ENDPOINT_URL": "http://10.1.2.3:9000"}, True),
        ({"AWS_ENDPOINT": "http://minio:9000"}, True),
        ({"AWS_ENDPOINT_URL": "https://minio.storage.svc.cluster.local"}, True),
        ({"AWS_ENDPOINT_URL": "https://minio.storage.svc"}, True),
        ({"AWS_ENDPOINT_URL": "http://minio:9000", "AWS_PROXY_URL": "http://proxy:3128"}, False),
        ({"AWS_ENDPOINT_URL": "https://s3.example.com"}, False),
        ({"AWS_ENDPOINT_URL": "https://8.8.8.8"}, False),
        ({"AWS_ENDPOINT_URL": ""}, False),
        ({}, False),
    ],
)
def test_a_bucket_outside_is_reached_as_the_machine_says_and_one_nearby_directly(
    variables: dict[str, str], is_past: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert bool(_past_proxies()) == is_past


def test_a_containers_health_is_asked_directly(asked: list[object], tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN, encoding="utf-8")
    here = {"/run/secrets/access_token": str(tmp_path / "token")}
    with serving(CodedTarget(), token=TOKEN) as server, serving_app(App()) as other:
        here |= {"8001": server.url.rpartition(":")[2], "9464": str(other.port)}
        for name in ("producers", "consumers", "target-server"):
            kind, program, *words = SERVICES[name]["healthcheck"]["test"]
            assert (kind, program) == ("CMD", "python")
            for old, new in here.items():
                words = [word.replace(old, new) for word in words]
            ended = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60, check=False)
            assert ended.returncode == 0, ended.stderr
    assert asked == []


@pytest.mark.parametrize("name", ["prometheus", "grafana"])
def test_the_monitorings_health_is_asked_directly(name: str) -> None:
    """Their images' wget is BusyBox', which has no exemptions and knows `-Y off`."""
    kind, program, *words = SERVICES[name]["healthcheck"]["test"]
    assert (kind, program, words[:2]) == ("CMD", "wget", ["-Y", "off"])
    if shutil.which("busybox"):
        said = subprocess.run(["busybox", "wget", "--help"], capture_output=True, text=True, check=False).stderr
        assert "-Y" in said


def test_grafana_asks_its_neighbour_directly() -> None:
    environment = SERVICES["grafana"]["environment"]
    assert environment["NO_PROXY"] == environment["no_proxy"] == "prometheus"

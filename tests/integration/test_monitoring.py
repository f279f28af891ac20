"""deploy/monitoring against a real run: a real Prometheus scrapes it, and every panel of the dashboard has data."""

import json
import os
import re
import runpy
import secrets
import shutil
import signal
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import target_servers
from commands import Shell, conversation, save_tiny_target, write_rows
from eaglefeed.metrics import METRICS, Kind, Reading, Shower
from eaglefeed.ops.collector import Shown
from eaglefeed.ops.readings import StepWatch
from eaglefeed.producer.loading import load_target
from eaglefeed.producer.target import HFEagle3TargetModel
from ports import free_port

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "deploy" / "monitoring"
DASHBOARD = json.loads((MONITORING / "grafana" / "dashboards" / "eaglefeed.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TOKEN = secrets.token_hex(16)
SCRAPE_S, PATIENCE_S = 0.2, 30.0


def wait_until(there: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not there():
        assert time.monotonic() < end_s
        time.sleep(0.05)


class Prometheus:
    """The real one, with the configuration of deploy/monitoring but for where its targets are, and how often."""

    def __init__(self, folder: Path, targets: dict[str, list[int]]) -> None:
        self.folder, self.port, self.start_s = folder, free_port(), time.time()
        config = yaml.safe_load((MONITORING / "prometheus.yml").read_text(encoding="utf-8"))
        config["global"] = {"scrape_interval": f"{SCRAPE_S * 1000:g}ms", "scrape_timeout": f"{SCRAPE_S * 1000:g}ms"}
        token = folder / "token"
        token.write_text(TOKEN)
        for job in config["scrape_configs"]:
            del job["dns_sd_configs"]
            assert job["authorization"]["credentials_file"] == "/run/secrets/access_token"
            job["authorization"]["credentials_file"] = str(token)
            job["static_configs"] = [{"targets": [f"127.0.0.1:{port}" for port in targets[job["job_name"]]]}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))

    @contextmanager
    def running(self) -> "Iterator[Prometheus]":
        command = ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data", "--log.level=error"]
        command += [f"--web.listen-address=127.0.0.1:{self.port}"]
        with (self.folder / "log").open("wb") as log:
            process = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log)
        try:
            self._wait_ready()
            yield self
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE_S)

    def _wait_ready(self) -> None:
        wait_until(self._is_ready)

    def _is_ready(self) -> bool:
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{self.port}/-/ready", timeout=5):
            return True
        return False

    def wait_scraping(self) -> None:
        """It begins to scrape some seconds after its start."""
        wait_until(lambda: self.has_data('up{job="eaglefeed-target"}'))

    def ask(self, path: str, **query: Any) -> Any:
        words = urllib.parse.urlencode({"start": self.start_s - 1, "end": time.time() + 1, **query}, doseq=True)
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/v1/{path}?{words}", timeout=30) as reply:
            return json.load(reply)["data"]

    def has_data(self, expression: str) -> bool:
        found = self.ask("query_range", query=expression, step="0.25")["result"]
        return any(float(value) == float(value) for series in found for _, value in series["values"])


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """What Prometheus saw of a whole run in which a row was rejected and a sample was broken."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed: see scripts/install-servers")
    folder = tmp_path_factory.mktemp("monitored")
    torch.set_num_threads(1)
    target = save_tiny_target(folder / "target")
    before = Path.cwd()
    os.chdir(folder)
    model = HFEagle3TargetModel(load_target(str(target)))
    try:
        with target_servers.serving(model, token=TOKEN) as server:
            producer, trainer, served = free_port(), free_port(), int(server.url.rpartition(":")[2])
            targets = {"eaglefeed": [producer, trainer], "eaglefeed-target": [served]}
            with Prometheus(folder, targets).running() as prometheus:
                run_all(prometheus, target, producer, trainer)
                yield prometheus
    finally:
        os.chdir(before)


def run_all(prometheus: Prometheus, target: Path, producer_port: int, trainer_port: int) -> None:
    folder = prometheus.folder
    write_rows(folder / "rows.jsonl", [*(conversation(index) for index in range(24)), "no JSON"])
    words = [f"target.name={target}", "target.dtype=float32", "target.num_threads=1", "train.num_threads=1"]
    words += ["access.token_file=token", "feed.max_length=128", "draft.vocab_size=259", "train.checkpoint_every=4"]
    shell = Shell(SilentCapture(), *words)  # type: ignore[arg-type]
    assert shell.run("feed", "rows.jsonl").code == 0
    prometheus.wait_scraping()
    with slowed("eaglefeed.producer.making.SampleMaker.make", 0.1):
        assert shell.run("produce", f"metrics.port={producer_port}").code == 0
    shard = min((folder / "runs" / "default" / "shards").rglob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    with slowed("eaglefeed.consumer.trainer.DraftTrainer.step", 0.1):
        assert shell.run("train", f"metrics.port={trainer_port}").code == 0


class SilentCapture:
    """For Shell where there is no capsys: a fixture of a module has none."""

    def readouterr(self) -> Any:
        return type("Nothing", (), {"out": "", "err": ""})


@contextmanager
def slowed(name: str, seconds: float) -> Iterator[None]:
    """A call that takes longer, so that it is scraped meanwhile."""
    where, _, method = name.rpartition(".")
    module, _, kind = where.rpartition(".")
    owner = getattr(__import__(module, fromlist=[kind]), kind)
    whole = getattr(owner, method)

    def slow(*args: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return whole(*args, **options)

    setattr(owner, method, slow)
    try:
        yield
    finally:
        setattr(owner, method, whole)


def test_every_metric_of_the_table_is_scraped(seen: Prometheus) -> None:
    found = {series["__name__"] for series in seen.ask("series", **{"match[]": '{__name__=~"eaglefeed_.+"}'})}
    missing = {name for name in METRICS if not any(each.startswith(name) for each in found)}
    assert missing == set()
    unknown = {name for name in found if not any(name.startswith(each) for each in METRICS)}
    assert unknown == set()


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_every_query_of_a_panel_has_data(seen: Prometheus, panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        expression = target["expr"].replace("$run", "default").replace("$__rate_interval", "1s")
        assert "$" not in expression
        assert seen.has_data(expression), expression


def test_each_instance_is_one_target_and_is_let_in_with_the_token(seen: Prometheus) -> None:
    assert seen.has_data('up{job="eaglefeed-target"} == 1')
    assert not seen.has_data('scrape_samples_scraped{job="eaglefeed"} > 300')


def test_the_runs_numbers_are_the_same_wherever_they_are_read(seen: Prometheus) -> None:
    done = seen.ask("query_range", query='max by (queue) (eaglefeed_items{state="done"})', step="0.25")["result"]
    newest = {series["metric"]["queue"]: max(float(value) for _, value in series["values"]) for series in done}
    assert newest["prompts"] == 24
    dead = seen.ask("query_range", query="max by (reason) (eaglefeed_dead_letters)", step="0.25")["result"]
    assert [series["metric"]["reason"] for series in dead] == ["SampleCorrupt"]


# the files


def test_the_dashboard_asks_for_metrics_of_the_table_and_says_units_and_legends() -> None:
    asked = set()
    for panel in PANELS:
        assert panel["description"], panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        for target in panel["targets"]:
            asked |= set(re.findall(r"\b(?:eaglefeed|process)_\w+", target["expr"]))
            assert target["legendFormat"] or panel["type"] == "table", panel["title"]
    histograms = {f"{name}_bucket" for name in METRICS}
    assert {name for name in asked if name.startswith("eaglefeed_")} <= METRICS.keys() | histograms


def test_a_runs_metrics_are_asked_for_one_run_and_for_the_whole_run_once() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            for name in re.findall(r"eaglefeed_\w+", target["expr"]):
                metric = METRICS.get(name.removesuffix("_bucket"))
                assert metric is not None
                assert ('run=~"$run"' in target["expr"]) == ("run" in metric.labels), target["expr"]
                if metric.shower is Shower.RUN:  # several instances show it: a sum would count it several times
                    assert re.search(r"max by \([^)]*\) \((rate\()?" + name, target["expr"]), target["expr"]


def test_panels_lie_side_by_side_and_use_the_provisioned_source() -> None:
    source = yaml.safe_load((MONITORING / "grafana" / "datasources" / "prometheus.yml").read_text(encoding="utf-8"))
    (uid,) = [each["uid"] for each in source["datasources"]]
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    sources = {panel["datasource"]["uid"] for panel in PANELS} | {
        target["datasource"]["uid"] for panel in PANELS for target in panel["targets"]
    }
    assert sources == {uid}


def test_prometheus_scrapes_the_services_of_the_compose_file_that_listen() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text(encoding="utf-8"))
    jobs = {job["job_name"]: job["dns_sd_configs"][0] for job in config["scrape_configs"]}
    assert set(jobs["eaglefeed"]["names"]) == {name for name in compose if name.startswith(("producers", "consumers"))}
    assert set(jobs["eaglefeed-target"]["names"]) == {name for name in compose if name.startswith("target-server")}
    for names, variable in (("eaglefeed", "EAGLEFEED_METRICS__PORT"), ("eaglefeed-target", "EAGLEFEED_SERVE__PORT")):
        for name in jobs[names]["names"]:
            assert int(compose[name]["environment"][variable]) == jobs[names]["port"], name


def test_the_table_in_the_docs_is_the_codes() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    script = runpy.run_path(str(ROOT / "scripts" / "metrics-table"))
    assert script["page"]() == page, "run scripts/metrics-table"
    assert {f"`{name}`" for name in METRICS} <= set(re.findall(r"`eaglefeed_\w+`", page))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed: see scripts/install-servers")
def test_promtool_has_nothing_to_say_of_the_configuration_and_of_what_is_shown(tmp_path: Path) -> None:
    text = (MONITORING / "prometheus.yml").read_text(encoding="utf-8")
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "prometheus.yml").write_text(text.replace("/run/secrets/access_token", str(tmp_path / "token")))
    check(["promtool", "check", "config", str(tmp_path / "prometheus.yml")])
    shown = Shown("producer", "run")
    for name, metric in METRICS.items():
        if metric.kind not in (Kind.HISTOGRAM, Kind.INFO):
            labels = tuple("x" for _ in metric.labels)
            shown.add(lambda name=name, labels=labels: [Reading(name, 1.0, labels)])
    shown.add_families(StepWatch(("run", "samples", "main")).durations)
    check(["promtool", "check", "metrics"], shown.text())


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed: see scripts/install-servers")
def test_the_queries_of_the_docs_are_such_and_ask_for_metrics_of_the_table(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    queries = re.findall(r"^\| [^|]+\? \| `([^`]+)` \|$", page, re.MULTILINE)
    assert len(queries) == 5
    rules = [{"alert": f"q{number}", "expr": query} for number, query in enumerate(queries)]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "docs", "rules": rules}]}))
    check(["promtool", "check", "rules", str(tmp_path / "rules.yml")])
    assert set(re.findall(r"eaglefeed_\w+", " ".join(queries))) <= set(METRICS)


def check(command: list[str], given: bytes = b"") -> None:
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, input=given, timeout=60, check=False, **both)
    assert done.returncode == 0, done.stdout.decode()

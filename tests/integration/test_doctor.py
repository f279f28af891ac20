"""`eaglefeed doctor`: a look at everything leaves nothing behind; settings and GPUs."""

import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import Shell, conversation, save_tiny_target, write_rows
from doctors import found, left_in, only, worst
from eaglefeed.cli.doctor import Part
from eaglefeed.errors import QueueUnavailable
from eaglefeed.ops.doctor import Finding, Said, look, ok
from eaglefeed.ops.doctor_gpu import GpuPlan, examine_gpus
from eaglefeed.queue import EmbeddedServer
from eaglefeed.queue.server_process import is_alive


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    small = ["feed.max_length=128", "draft.vocab_size=259", "queue.high_bytes=67108864"]
    return Shell(capsys, f"target.name={target}", "target.dtype=float32", *small)


def test_a_machine_that_is_well_passes_and_nothing_is_left_behind(shell: Shell, tmp_path: Path) -> None:
    ended = shell.run("doctor", "--json", "--load")
    assert ended.code == 0, ended.out
    statuses = {each["check"]: each["status"] for each in ended.document["findings"]}
    assert {check.partition(".")[0] for check in statuses} == set(Part)
    well = ("queue.rights", "queue.persistence", "store.write", "target.mask", "target.weights", "target.layers")
    assert {statuses[check] for check in well} == {"ok"}
    assert ended.document["counts"]["fail"] == 0
    assert left_in(tmp_path) == []


def test_a_doctor_that_is_ended_leaves_no_server_and_no_folder(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = tmp_path / "temporary"
    places.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(places))
    seen: list[bool] = []

    def end(*_: object, **__: object) -> Iterator[Finding]:
        seen.append(all(is_alive(place) for place in places.iterdir()))
        signal.raise_signal(signal.SIGTERM)
        yield Finding("queue.reachable", "ok", "the signal was not heard")

    monkeypatch.setattr("eaglefeed.ops.doctor_queue.examine_queue", end)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        assert shell.run("doctor", "--only", "queue").code == 130
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [True]
    assert left_in(places) == []


def test_a_server_that_does_not_stop_keeps_no_other_part_from_being_looked_at(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places, close = tmp_path / "temporary", EmbeddedServer.close
    places.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(places))

    def closed(server: EmbeddedServer) -> None:
        close(server)
        raise QueueUnavailable("the server", "it does not stop")

    monkeypatch.setattr(EmbeddedServer, "close", closed)
    ended = shell.run(*only("queue", "store"))
    assert ended.code == 0, ended.err
    assert found(ended, "store.write")["status"] == "ok"
    assert "server_not_stopped" in ended.err
    assert left_in(places) == []


def test_a_look_that_is_interrupted_removes_what_it_made(tmp_path: Path) -> None:
    probe, main, seen = tmp_path / "probe", threading.main_thread().ident, []

    def ask() -> Iterator[Said]:
        probe.touch()
        threading.Event().wait(0.1)  # the doctor waits for the answer by now
        signal.pthread_kill(main, signal.SIGINT)
        threading.Event().wait(0.2)
        seen.append(probe.exists())
        probe.unlink()
        yield ok("")

    with pytest.raises(KeyboardInterrupt):
        look("a.look", ask)
    assert seen == [True]
    assert not probe.exists()


def test_lines_for_people_tell_each_fix_and_end_with_the_counts(shell: Shell) -> None:
    ended = shell.run("doctor", "--only", "settings", "train.target_backend=remote")
    assert ended.code == 3
    lines = ended.out.splitlines()
    assert any(line.startswith("fail     settings.together: train.target_backend=remote") for line in lines)
    assert any(line.strip().startswith("fix: pass --remote-urls http://") for line in lines)
    assert lines[-1] == "2 ok, 0 warnings, 1 failures, 0 skipped"


def counts_of(shell: Shell) -> dict[str, Any]:
    """What the queues hold; how old it is grows by itself."""
    document = shell.run("queue", "stats", "--json").document
    return {name: document[name] | {"oldest_ready_s": 0} for name in ("prompts", "samples")}


def test_a_run_under_way_is_looked_at_where_it_lies_and_stays_as_it_was(shell: Shell, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [conversation(index) for index in range(3)])
    assert shell.run("feed", rows).code == 0
    before = counts_of(shell)
    files = left_in(tmp_path / "runs" / "default" / "shards")
    ended = shell.run(*only("queue", "store"))
    assert ended.code == 0, ended.out
    assert found(ended, "queue.server")["what"].endswith("runs/default/queue")
    assert counts_of(shell) == before
    assert left_in(tmp_path / "runs" / "default" / "shards") == files


def test_a_run_that_is_all_produced_and_retained_needs_no_more_room(shell: Shell, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [conversation(index) for index in range(3)])
    assert shell.run("feed", rows).code == 0
    assert "B that are still to be produced" in found(shell.run(*only("queue", "store")), "store.space")["what"]
    assert shell.run("produce").code == 0
    ended = shell.run(*only("queue", "store"), "train.retain=true")
    assert "adds at most 0 B at once, of 0 B that are" in found(ended, "store.space")["what"]


def test_queue_and_store_are_looked_at_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from eaglefeed.cli import main\n"
        "try: main(['doctor', '--only', 'settings', '--only', 'queue', '--only', 'store'])\n"
        "except SystemExit as ended: assert not ended.code, ended.code\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_a_look_that_hangs_is_a_failure_and_the_next_look_goes_on() -> None:
    release = threading.Event()

    def hangs() -> list[Said]:
        release.wait(30)
        return [ok("too late")]

    said = look("disk", hangs, deadline_s=0.05)
    assert [(each.check, each.status) for each in said] == [("disk", "fail")]
    assert "no answer within 0.05 s" in said[0].what
    assert look("next", lambda: [ok("fine")])[0].status == "ok"
    release.set()


def test_a_look_that_breaks_is_told_and_not_raised() -> None:
    def breaks() -> list[Said]:
        raise RuntimeError("a surprise")

    assert "RuntimeError: a surprise" in look("x", breaks)[0].what


@pytest.mark.parametrize(
    ("overrides", "status", "words"),
    [
        (["train.group=b"], "warn", "not one of queue.groups=main"),
        (["train.target_backend=remote"], "fail", "without train.remote_urls"),
        (["target.tp_size=2"], "fail", "runs on one device"),
        (["target.engine_url=http://localhost:1"], "fail", "is of vllm"),
        (["train.retain=true", "store.uri=nccl://127.0.0.1:9000"], "fail", "die with their producer"),
        (["store.data_plane=nccl"], "fail", "between GPUs"),
        (["train.remote_data_plane=nccl"], "fail", "between GPUs"),
        (["queue.stall_timeout_s=5"], "fail", "before the first renewal"),
        (["queue.max_lease_age_s=30"], "warn", "below queue.visibility_timeout_s"),
        (["serve.host=0.0.0.0"], "fail", "without a token"),
        (["metrics.host=0.0.0.0", "metrics.port=9464"], "fail", "without a token"),
        (["store.uri=nccl://10.0.0.1:9000"], "fail", "without a token"),
        (["redis_url=redis://10.0.0.1:6379"], "warn", "no password is set"),
        (["redis_url=redis://10.0.0.1:6379", "store.uri=shm://x"], "warn", "seen by this one alone"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_settings_that_do_not_go_together_are_told(shell: Shell, overrides: list[str], status: str, words: str) -> None:
    ended = shell.run(*only("settings"), *overrides)
    findings = [each for each in ended.document["findings"] if words in each["what"]]
    assert [each["status"] for each in findings] == [status], ended.out
    assert findings[0]["fix"]
    assert ended.code == (3 if status == "fail" else 0)
    assert "secret-word" not in ended.out + ended.err


def test_a_password_that_travels_in_the_clear_is_told_and_not_shown(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLEFEED_REDIS_URL", "redis://:secret-word@10.0.0.1:6379")
    ended = shell.run(*only("settings"))
    assert "in the clear" in found(ended, "settings.together")["what"]
    assert "secret-word" not in ended.out + ended.err


def test_a_dashboard_that_is_not_installed_is_told(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eaglefeed.cli.doctor_settings.find_spec", lambda name: None if name == "wandb" else name)
    ended = shell.run(*only("settings"), "train.report_to=wandb,tensorboard")
    told = [each["what"] for each in ended.document["findings"] if each["status"] == "fail"]
    assert told == ["train.report_to=wandb is not installed"]


def test_a_secret_that_everybody_may_read_is_told_without_the_secret(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("a-token-that-is-long-enough")
    file.chmod(0o644)
    ended = shell.run(*only("settings"), f"access.token_file={file}")
    assert found(ended, "settings.secrets")["status"] == "warn"
    assert "a-token-that" not in ended.out + ended.err
    file.chmod(0o600)
    assert found(shell.run(*only("settings"), f"access.token_file={file}"), "settings.secrets")["status"] == "ok"
    for name in ("access.token_file", "queue.password_file"):
        missing = found(shell.run(*only("settings"), f"{name}={file}x"), "settings.secrets")
        assert (missing["status"], missing["fix"]) == ("fail", f"set {name} to a file that this user can read")


def test_a_device_that_this_machine_lacks_fails_with_what_to_install(shell: Shell) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has GPUs")
    ended = shell.run(*only("gpu"), "train.device=cuda", "store.data_plane=nccl")
    assert ended.code == 3
    assert "train.device=cuda" in found(ended, "gpu.driver")["what"]
    assert "train.device wants one" in found(ended, "gpu.torch")["what"]
    assert found(ended, "gpu.nccl")["status"] in {"fail", "ok"}


def test_without_a_gpu_and_a_setting_that_names_one_nothing_is_wrong(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    ended = shell.run(*only("gpu"))
    assert [(each["check"], each["status"]) for each in ended.document["findings"]] == [("gpu.driver", "skipped")]


def nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, says: str, code: int = 0) -> None:
    program = folder / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho '{says}'\nexit {code}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")


def gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_gpus_are_told_and_one_that_somebody_else_uses_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi(tmp_path, monkeypatch, "0, NVIDIA H100, 550.54, 70000, 81559\n1, NVIDIA H100, 550.54, 4, 81559")
    gpus(monkeypatch, 2)
    findings = list(examine_gpus(GpuPlan({"train.device": "cuda"})))
    drivers = [each for each in findings if each.check == "gpu.driver"]
    assert [each.status for each in drivers] == ["warn", "ok"]
    assert drivers[1].what == "GPU 1: NVIDIA H100, driver 550.54, 4 of 81559 MiB in use"
    assert worst(findings, "gpu.torch").status == "ok"


def test_a_driver_that_fails_is_told_in_its_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(tmp_path, monkeypatch, "Driver/library version mismatch", 18)
    finding = worst(examine_gpus(GpuPlan({})), "gpu.driver")
    assert (finding.status, "version mismatch" in finding.what) == ("fail", True)


@pytest.mark.parametrize(
    ("plan", "count", "words"),
    [
        (GpuPlan({"target.device": "cuda:2"}), 2, "target.device=cuda:2, and there are 2 GPUs"),
        (GpuPlan({"train.device": "cuda"}, local_rank=2, world_size=3), 2, "local rank 2 of 3 ranks has no GPU"),
        (GpuPlan({"train.device": "cuda"}), 0, "sees no GPU"),
    ],
    ids=["index", "ranks", "none"],
)
def test_a_rank_or_setting_without_a_gpu_of_its_own_is_told(
    plan: GpuPlan, count: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(monkeypatch, count)
    finding = worst(examine_gpus(plan), "gpu.torch")
    assert (finding.status, words in finding.what) == ("fail", True), finding

"""Every command that README and docs show does what they show, on a small target; what cannot be run here is listed."""

import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

import tiny_target
from commands import Ended, Shell, write_rows
from doc_sessions import GENERATED, PAGES, ROOT, Shown, commands_of, missing
from eaglefeed import HFEagle3TargetModel
from eaglefeed.errors import ConfigError
from eaglefeed.producer.loading import load_target
from eaglefeed.queue.server_process import find_server_binary
from eaglefeed.schema.vocab import VocabMapping
from target_servers import serving

NOT_RUN = {
    r"make .*": "installs, builds or measures; CI runs it: .ci/run",
    r"scripts/\S+ .*|\.venv/bin/python -m pytest .*|pytest .*": "the tests themselves: CONTRIBUTING.md",
    r"docker.*": "no docker here: tests/integration/test_compose_run.py runs what the services run",
    r"torchrun .*": "several processes: tests/integration/test_train_ranks.py",
    r".*vllm.*": "vLLM in an environment of its own: tests/contract/test_engines.py",
    r"eaglefeed serve-target.*": "serves until it is stopped: tests/integration/test_serve_command.py",
    r".*rediss://.*": "a server on another machine: tests/faults/test_addresses.py",
    r".*nccl://.*": "a producer that stays while a trainer pulls: tests/integration/test_peer_run.py",
    r"eaglefeed data (import|export) FOLDER.*": "another project's files: tests/integration/test_data_import.py",
    r"eaglefeed train --run imported": "goes on with the import: tests/integration/test_data_import.py",
    r"eaglefeed bench .*|python -m eaglefeed\.bench.*": "measures: tests/integration/test_bench.py runs --quick",
    r"eaglefeed answers src/\S+ .*": "writes a file of the package: tests/integration/test_answers.py",
    r"eaglefeed queue top --config run.yaml": "stays until it is stopped: tests/integration/test_queue_top.py",
}
SERVER = "http://127.0.0.1:8001"
# What stands there before a page's first command, or before one of its commands.
FED = ("eaglefeed feed conversations.jsonl --vocab vocab.safetensors", "eaglefeed produce --vocab vocab.safetensors")
AGAIN = ("eaglefeed queue purge --yes", "rm -r runs/{run}/shards runs/{run}/draft")
BEFORE: dict[tuple[str, str], tuple[str, ...]] = {
    ("docs/storage.md", "eaglefeed train train.retain=true"): FED,
    ("docs/training.md", "eaglefeed train --run mine train.retain=true"): (
        "eaglefeed queue purge --yes --run mine",
        "rm -r runs/mine/shards runs/mine/draft",
        *(f"{each} --run mine" for each in FED),
    ),
    ("docs/troubleshooting.md", "eaglefeed doctor --run mine"): tuple(f"{each} --run mine" for each in FED),
}
STARTS_ALONE = {"README.md", "docs/quickstart.md"}  # they make their own files


def reason_not_to(shown: Shown) -> str:
    if shown.fails:
        return ""
    return next((reason for pattern, reason in NOT_RUN.items() if re.fullmatch(pattern, shown.command)), "")


SHOWN = {page: commands_of(page) for page in PAGES}
RUN = {page: [each for each in shown if not reason_not_to(each)] for page, shown in SHOWN.items()}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target of 2,048 tokens, of which its tokenizer uses the first 259 and decodes all."""
    folder = tmp_path_factory.mktemp("target")
    sizes = tiny_target.tiny_sizes(vocab_size=2048, max_position_embeddings=4096)
    tiny_target.tiny_model(LlamaConfig(**sizes)).save_pretrained(folder)
    tokenizer = tiny_target.tiny_tokenizer()
    tokenizer.add_tokens([f"word{index} " for index in range(2048 - len(tokenizer))])
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def shell(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: Path
) -> Iterator["Terminal"]:
    try:
        find_server_binary()
    except ConfigError as error:
        pytest.skip(str(error))
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "EAGLEFEED_TARGET__NAME": str(target),
        "EAGLEFEED_TARGET__CACHE_DIR": str(tmp_path / "cache"),
        "EAGLEFEED_TRAIN__NO_PRODUCERS": "fail",  # so that a wrong session ends
        "EAGLEFEED_TRAIN__START_TIMEOUT_S": "10",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("EAGLEFEED_REDIS_URL", raising=False)
    (tmp_path / "src").symlink_to(ROOT / "src")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy")
    yield Terminal(Shell(capsys), capsys)
    torch.set_num_threads(1)


class Terminal:
    """Runs a line as a shell would: our commands and examples in this process, the rest in bash."""

    def __init__(self, shell: Shell, capsys: pytest.CaptureFixture[str]) -> None:
        self._shell, self._capsys = shell, capsys

    def type(self, line: str) -> Ended:
        """One line, to its end; what it would do in the background, it does now."""
        words = shlex.split(re.sub(r"(?: > \S+)?(?: 2>&1)?(?: &)?$", "", line), comments=True)
        variables = [words.pop(0) for _ in words if re.match(r"EAGLEFEED_\w+=", words[0])]
        with pytest.MonkeyPatch.context() as patch:
            for variable in variables:
                patch.setenv(*variable.split("=", 1))
            if words[0] == "eaglefeed":
                return self._shell.run(*words[1:])
            if words[0] == "python":
                patch.setattr(sys, "argv", words[1:])
                return self._example(words[1])
        ended = subprocess.run(["bash", "-ec", line], capture_output=True, text=True, timeout=30, check=False)
        return Ended(ended.returncode, ended.stdout, ended.stderr)

    def _example(self, path: str) -> Ended:
        self._capsys.readouterr()
        code: object = 0
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as ended:
            code = ended.code
        captured = self._capsys.readouterr()
        return Ended(int(bool(code)), captured.out, captured.err + str(code or ""))


def make_files(page: str) -> None:
    """The page's settings, or README's; and for a page that begins later, what README's first commands make."""
    blocks = [re.search(r"```yaml\n(.*?)```", PAGES[each], re.DOTALL) for each in (page, "README.md")]
    Path("run.yaml").write_text(next(block[1] for block in blocks if block), encoding="utf-8")
    if page in STARTS_ALONE:
        return
    packaged = ROOT / "src/eaglefeed/examples"
    prompts, answers = (
        [json.loads(line) for line in (packaged / name).read_text(encoding="utf-8").splitlines()]
        for name in ("prompts.jsonl", "answers.jsonl")
    )
    ids = {row["id"] for row in prompts[:8]}
    write_rows(Path("conversations.jsonl"), [row for row in answers if row["id"] in ids][-4:])
    mapping = VocabMapping.from_counts(torch.arange(2048).flip(0), draft_vocab_size=1024, vocab_size=2048)
    mapping.save(Path("vocab.safetensors"))


@pytest.fixture
def server(target: Path) -> Iterator[str]:
    model = HFEagle3TargetModel(load_target(str(target), dtype="bfloat16"))
    with serving(model) as started:
        yield started.url


@pytest.mark.parametrize("page", [page for page, shown in RUN.items() if shown])
def test_every_command_of_a_page_ends_and_prints_as_shown(
    page: str, shell: Terminal, request: pytest.FixtureRequest
) -> None:
    make_files(page)
    url = request.getfixturevalue("server") if any(SERVER in each.command for each in RUN[page]) else SERVER
    for shown in RUN[page]:
        for line in BEFORE.get((page, shown.command), ()):
            assert shell.type(line).code == 0, line
        ended = shell.type(shown.command.replace(SERVER, url))
        printed = ended.err + ended.out  # what is told on the way, then the result
        assert bool(ended.code) == shown.fails, f"{shown.command}: {ended.code}\n{printed}"
        assert missing(shown.output, printed) == [], f"{shown.command}\n{printed}"


def test_what_is_not_run_is_shown_and_tested_where_its_reason_says() -> None:
    every = [each for shown in SHOWN.values() for each in shown]
    for pattern, reason in NOT_RUN.items():
        assert any(re.fullmatch(pattern, each.command) for each in every), f"nothing shows {pattern}"
        for path in re.findall(r"\S+/\S+|\S+\.md", reason):
            assert (ROOT / path).exists(), path
    assert sum(map(len, RUN.values())) > 40
    assert not SHOWN[GENERATED]


def test_a_line_that_is_not_printed_is_found_missing() -> None:
    shown = ("trained 8 steps on 8 samples, at step 8, 0 dead", "…", "draft: runs/…/export-8", "3.1 MiB stored")
    printed = "trained 5 steps on 5 samples, at step 5, 1 dead\nx\ndraft: runs/a/export-5\n200 B stored\n"
    assert missing(shown, printed) == []
    assert missing(shown, printed.replace("trained", "learned")) == [shown[0]]
    assert missing((shown[2], shown[0]), printed) == [shown[0]], "in another order"

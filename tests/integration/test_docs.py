"""README and docs say what is there: links, commands, options, settings, files, names, and the example runs."""

import importlib.util
import inspect
import re
import shlex
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from textwrap import indent
from types import ModuleType

import pytest
import torch
import typer
from torch import Tensor, nn
from torch.distributed.run import parse_args

import pipeline
import samples
from eaglefeed import EmbeddedServer, HFEagle3TargetModel, SampleStream, connect, open_queue, open_store
from eaglefeed.cli.app import app
from eaglefeed.cli.train import train as train_command
from eaglefeed.config import Settings
from eaglefeed.errors import ConfigError
from eaglefeed.queue.scripts import SHARED
from eaglefeed.queue.server_process import find_server_binary
from eaglefeed.schema.batch import Eagle3TargetBatch
from eaglefeed.schema.contract import ASSETS_FILE
from target_servers import serving
from tiny_target import tiny_model

ROOT = Path(__file__).parents[2]
DOCS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted((ROOT / "docs").glob("*.md"))
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in DOCS}
EXAMPLE, REMOTE_EXAMPLE = (ROOT / "examples" / f"{name}_trainer.py" for name in ("my", "remote"))
OVERRIDE = re.compile(r"([a-z_]+)\.([a-z_]+)=.*")
# Files that a run makes, endings and patterns, and a name that stands for any.
MADE = re.compile(r"runs/.*|\./.*|.*[<*…].*|.*NAME.*|[a-z_-]+(\.jsonl|\.json|\.safetensors|\.yaml)|\.tmp.*|step-.*")


def code(text: str, language: str) -> list[str]:
    """The fenced blocks of a language ("" for those without one)."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block for kind, block in blocks if kind == language]


def spans(text: str) -> list[str]:
    """Code within sentences."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))


def command_words(text: str) -> Iterator[list[str]]:
    """The words behind `eaglefeed`, of every command line in blocks and sentences."""
    for line in chain(*(block.splitlines() for block in code(text, "")), spans(text)):
        found = re.match(r"(?:\$ )?(?:torchrun .* -m |EAGLEFEED_\w+=\S+ )?eaglefeed ((?!├|└|:).*)", line.strip())
        if found:
            yield shlex.split(found[1], comments=True)


COMMANDS = [
    pytest.param(words, id=f"{name}: {' '.join(words)}") for name, t in TEXTS.items() for words in command_words(t)
]


def resolve(words: list[str]) -> tuple[typer.core.TyperCommand, list[str]]:
    """The command that the first words name, and the words behind it."""
    command = typer.main.get_command(app)
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        assert words[0] in command.commands, f"no such command: {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    return command, words


def options_of(command: typer.core.TyperCommand) -> set[str]:
    return {"--help", *(name for parameter in command.params for name in parameter.opts)}


def all_commands() -> Iterator[tuple[str, typer.core.TyperCommand]]:
    def below(name: str, command: typer.core.TyperCommand) -> Iterator[tuple[str, typer.core.TyperCommand]]:
        if not hasattr(command, "commands"):
            yield name, command
        for word, each in getattr(command, "commands", {}).items():
            yield from below(f"{name} {word}".strip(), each)

    return below("", typer.main.get_command(app))


@pytest.mark.parametrize("name", TEXTS)
def test_relative_links_lead_to_files_and_headings(name: str) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", TEXTS[name]):
        if "://" in target:
            continue
        path, _, heading = target.partition("#")
        page = (ROOT / name).parent / path if path else ROOT / name
        assert page.exists(), target
        headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE) if heading else []
        assert heading in ["", *(re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings)], target


@pytest.mark.parametrize("words", COMMANDS)
def test_commands_in_the_docs_exist_with_their_options(words: list[str]) -> None:
    command, rest = resolve(words)
    options = [word.partition("=")[0] for word in rest if word.startswith("-")]
    assert set(options) <= options_of(command)
    for override in filter(None, map(OVERRIDE.fullmatch, rest)):
        assert_is_setting(override[1], override[2])


def test_the_docs_show_command_lines_at_all() -> None:
    assert len(COMMANDS) > 15, "the pattern finds none"


def test_readme_names_every_command() -> None:
    for name, _ in all_commands():
        assert f"eaglefeed {name}" in TEXTS["README.md"] or f"make {name}" in TEXTS["README.md"], name


def test_long_options_in_sentences_are_some_commands() -> None:
    known = set().union(*(options_of(command) for _, command in all_commands())) | {"--version", "--scale", "--volumes"}
    for text in TEXTS.values():
        for span in spans(text):
            if not re.match("docker|pytest", span):
                assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", span)) <= known, span


def assert_is_setting(section: str, field: str) -> None:
    assert section in Settings.model_fields, section
    assert field in type(getattr(Settings(), section)).model_fields, f"{section}.{field}"


def test_settings_in_the_docs_exist() -> None:
    found = 0
    for name, text in TEXTS.items():
        for span in spans("" if "benchmarks" in name else text):  # figures there have names of the same form
            match = re.fullmatch(r"([a-z]+)\.([a-z_]+)(?:=\S+)?", span)
            if (
                match
                and match[1] in Settings.model_fields
                and match[2] not in ("py", "jsonl", "lua", "safetensors", "yaml", "md", "html", "json")
            ):
                assert_is_setting(match[1], match[2])
                found += 1
    assert found > 15


def test_the_settings_file_of_the_readme_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from eaglefeed.config import load_settings

    monkeypatch.delenv("EAGLEFEED_REDIS_URL", raising=False)
    (block,) = code(TEXTS["README.md"], "yaml")
    (tmp_path / "run.yaml").write_text(block, encoding="utf-8")
    settings = load_settings(tmp_path / "run.yaml")
    assert (settings.run.id, settings.produce.supervision, settings.draft.vocab_size) == ("first", "target_probs", 1024)


@pytest.mark.parametrize("name", TEXTS)
def test_files_and_folders_in_the_docs_exist(name: str) -> None:
    for span in spans(TEXTS[name]):
        path = span.partition("::")[0].rstrip("/")
        looks = re.fullmatch(
            r"[\w./{}*<>…-]+\.(py|lua|md|toml|yml|txt|jsonl)|(src|tests|docs|scripts|examples)/\S+", path
        )
        if looks and not MADE.fullmatch(path):
            assert (ROOT / path).exists() or (ROOT / "src" / "eaglefeed" / path).exists() or is_script(path), path


def is_script(path: str) -> bool:
    return (ROOT / "src/eaglefeed/queue/lua" / path).exists()


def test_dotted_names_of_the_package_exist() -> None:
    for text in TEXTS.values():
        for name in re.findall(r"\beaglefeed(?:\.[a-z0-9_]+)+\b", text):
            assert importlib.util.find_spec(name) or name == "eaglefeed.json", name  # a file of deploy/monitoring


def test_every_queue_script_has_its_paragraph() -> None:
    told = set(re.findall(r"^- \*\*([a-z]+)\*\*", TEXTS["docs/queue.md"], re.MULTILINE))
    there = {path.stem for path in (ROOT / "src/eaglefeed/queue/lua").glob("*.lua")} - set(SHARED)
    assert told == there


def test_tests_that_the_docs_name_exist() -> None:
    there = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    named = {name for text in TEXTS.values() for name in re.findall(r"`(test_\w+)`", text)}
    assert len(named) > 20
    assert named <= there


def test_readme_python_imports_work_and_its_trainer_is_the_example() -> None:
    blocks = code(TEXTS["README.md"], "python")
    assert all(block in REMOTE_EXAMPLE.read_text(encoding="utf-8") for block in code(TEXTS["docs/remote.md"], "python"))
    imports = [block for block in blocks if block.startswith("from ")]
    assert imports
    for block in imports:
        exec(compile(block, "README.md", "exec"), {})
    for block in blocks:
        assert block in imports or block in EXAMPLE.read_text(encoding="utf-8"), block


def test_torchrun_takes_the_commands_that_are_shown_for_it() -> None:
    lines = [line for text in TEXTS.values() for line in re.findall(r"^torchrun .*$", text, re.MULTILINE)]
    lines += re.findall(r"torchrun --.*$", inspect.getdoc(train_command) or "", re.MULTILINE)
    assert len(lines) == 2
    for line in lines:
        words = parse_args(shlex.split(line)[1:])
        assert (words.training_script, words.training_script_args[0]) == ("eaglefeed", "train"), line


def test_the_loops_of_the_training_guide_are_those_of_the_examples() -> None:
    examples = [(ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8") for name in ("torch_loop", "hf_trainer")]
    blocks = code(TEXTS["docs/training.md"], "python")
    assert len(blocks) == 3
    for block in blocks:
        shown = (block, indent(block, " " * 4))
        assert any(each in example for example in examples for each in shown), block


class ProbsTarget(pipeline.EchoTarget):
    """Projects onto the whole vocabulary, so that a run with a vocabulary map costs nothing."""

    def generate_batch(self, input_ids: Tensor, attention_mask: Tensor, loss_mask: Tensor) -> Eagle3TargetBatch:
        tensors = super().generate_batch(input_ids, attention_mask, loss_mask).tensors()
        probs = tensors.pop("logits")  # one-hot rows sum to 1
        mask = tensors["loss_mask"].bool().unsqueeze(-1)
        return Eagle3TargetBatch(**tensors, target_probs=probs, position_mask=mask)


def load_example(path: Path = EXAMPLE) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_trains_on_every_sample_and_acknowledges_it() -> None:
    run = pipeline.Run(clock=pipeline.TurnableClock(), target=ProbsTarget())
    run.feed(*(pipeline.prompt(index) for index in range(6)))
    run.produce(own=pipeline.contract(supervision="target_probs"))
    model = nn.Linear(3 * samples.H, pipeline.VOCAB)
    before = model.weight.detach().clone()
    with SampleStream(run.samples, run.store, consumer="mine") as stream:
        losses = load_example().train(stream, model, torch.optim.AdamW(model.parameters(), lr=0.1))
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    assert not torch.equal(model.weight, before)
    assert run.samples.stats().done == 6


def test_the_example_runs_from_a_runs_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        find_server_binary()
    except ConfigError as error:
        pytest.skip(str(error))
    folder = tmp_path / "own"
    store = open_store(str(folder / "shards"))
    store.put_assets(ASSETS_FILE, {"t2d": torch.ones(pipeline.VOCAB, dtype=torch.bool)}, {"config": "{}"})
    run = pipeline.Run(clock=pipeline.TurnableClock(), store=store, target=ProbsTarget())
    with EmbeddedServer(folder / "queue") as server:
        client = connect(server.url)
        run.prompts, run.samples = (open_queue(client, "own", name) for name in ("prompts", "samples"))
        run.feed(*(pipeline.prompt(index) for index in range(4)))
        run.produce(own=pipeline.contract(supervision="target_probs"))
        load_example().main(folder)
        assert run.samples.stats().done == 4
        client.close()
    store.close()
    assert capsys.readouterr().out.startswith("4 steps, loss ")


def test_the_remote_example_trains_on_what_a_server_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(HFEagle3TargetModel(tiny_model())) as server:
        load_example(REMOTE_EXAMPLE).main([server.url])
    losses = re.fullmatch(r"8 steps, loss (\S+) at first, (\S+) at last\n", capsys.readouterr().out)
    assert losses is not None
    assert float(losses[2]) < float(losses[1])


def test_no_document_names_a_path_of_somebodys_machine() -> None:
    for name, text in TEXTS.items():
        assert not re.search(r"(?<![\w.…])/(work|home|root|tmp|Users)/", text), name
        hosts = set(re.findall(r"https?://([\w.-]+)", text))
        assert hosts <= {"download.pytorch.org", "keepachangelog.com", "127.0.0.1", "host", "HOST"}, name

"""docs/reference.md is what scripts/reference makes of the code, and the code says what everything means."""

import importlib.util
import re
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

from eaglefeed import errors
from eaglefeed.cli.app import EXIT_CODES
from eaglefeed.config import Settings

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "reference"
PAGE = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
SECTIONS = {name: type(getattr(Settings(), name)) for name in Settings.model_fields if name != "redis_url"}
FIELDS = [f"{name}.{field}" for name, section in SECTIONS.items() for field in section.model_fields]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    loader = SourceFileLoader("reference_script", str(SCRIPT))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "dont_write_bytecode", True)
        loader.exec_module(module)
    return module


def test_the_reference_is_up_to_date(script: ModuleType) -> None:
    assert script.page() == PAGE, "run scripts/reference"


def test_every_setting_stands_in_the_reference_with_a_meaning() -> None:
    for name in FIELDS:
        (line,) = re.findall(rf"^\| `{re.escape(name)}` .*$", PAGE, re.MULTILINE)
        assert len(line.split(" | ")[-1]) > 15, line


def test_every_command_and_option_says_what_it_does(script: ModuleType) -> None:
    commands = list(script.leaves("eaglefeed", script.typer.main.get_command(script.app)))
    assert len(commands) > 15
    for name, command in commands:
        assert command.help, name
        assert f"### {name}\n" in PAGE
        for each in command.params:
            assert each.help, f"{name} {each.name}"


def test_the_table_of_errors_has_every_class_with_its_exit_code() -> None:
    for name in errors.__all__:
        (line,) = re.findall(rf"^\| [^|]*`{name}` .*$", PAGE, re.MULTILINE)
        code = next((code for kind, code in EXIT_CODES if issubclass(getattr(errors, name), kind)), 1)
        assert line.split(" | ")[3] == str(code), line


def test_bounds_and_defaults_are_told_as_they_are_typed(script: ModuleType) -> None:
    assert "| `train.from_step` | integer, above 0 |  |" in PAGE
    assert "| `serve.port` | integer, at least 0, at most 65535 | `8001` |" in PAGE
    assert "| `target.aux_layer_ids` | 3 x integer |  |" in PAGE
    assert "| `queue.high_bytes` | integer, above 0 | `68719476736` (64 GiB) |" in PAGE
    assert script.row("a|b", "c\nd") == "| a\\|b | c d |"


def test_the_page_says_nothing_of_the_machine_it_is_made_on(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("EAGLEFEED_RUN__ID", "EAGLEFEED_TARGET__NAME", "EAGLEFEED_REDIS_URL"):
        monkeypatch.setenv(name, "of-this-machine")
    monkeypatch.setenv("EAGLEFEED_ACCESS__TOKEN", "a-secret-of-this-machine")
    assert script.page() == PAGE

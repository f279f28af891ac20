"""scripts/train-long: its prompts, who is held out, and what decides its exit code."""

import json
from importlib.machinery import SourceFileLoader
from importlib.resources import files
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import xxhash

SCRIPT = Path(__file__).resolve().parent.parent.parent / "scripts" / "train-long"
TOPICS = json.loads((files("eaglefeed") / "examples" / "topics.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def script() -> ModuleType:
    loader = SourceFileLoader("train_long", str(SCRIPT))
    spec = spec_from_loader("train_long", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def report(accept_length: float, lookup: float, mismatches: int = 0) -> dict[str, Any]:
    return {
        "accept_length": {"all": accept_length},
        "prompt_lookup": {"all": lookup},
        "curve": [{"step": 40, "accept_length": accept_length, "accuracies": [0.5, 0.25]}],
        "mismatches": mismatches,
    }


def test_a_prompt_is_made_for_every_form_and_topic_with_an_id_of_its_own(script: ModuleType) -> None:
    kinds = {"tea": {"forms": ["What is {}?", "Why {}?"], "topics": ["Green tea", "a cup, hot"]}}
    made = {row["id"]: row["messages"] for row in script.made_prompts(kinds)}
    assert made == {
        "tea.green-tea.1": [{"role": "user", "content": "What is Green tea?"}],
        "tea.green-tea.2": [{"role": "user", "content": "Why Green tea?"}],
        "tea.a-cup-hot.1": [{"role": "user", "content": "What is a cup, hot?"}],
        "tea.a-cup-hot.2": [{"role": "user", "content": "Why a cup, hot?"}],
    }


def test_the_packaged_topics_make_thousands_of_distinct_prompts(script: ModuleType) -> None:
    rows = list(script.made_prompts(TOPICS))
    assert len(rows) >= 2500
    assert len({row["id"] for row in rows}) == len({row["messages"][0]["content"] for row in rows}) == len(rows)
    assert all(form.count("{}") == 1 for kind in TOPICS.values() for form in kind["forms"])


def test_all_forms_of_a_topic_are_held_out_together_or_not_at_all(script: ModuleType) -> None:
    topics: dict[str, set[bool]] = {}
    for row in script.made_prompts(TOPICS):
        topics.setdefault(row["id"].rsplit(".", 1)[0], set()).add(script.is_held_out(row["id"]))
    assert all(len(held_out) == 1 for held_out in topics.values())
    assert 0.05 < sum(True in held_out for held_out in topics.values()) / len(topics) < 0.2


def test_who_is_held_out_depends_on_the_id_alone(script: ModuleType) -> None:
    assert script.is_held_out("facts-001") is (xxhash.xxh32_intdigest(b"facts-001") % 10 == 0)
    assert script.is_held_out("tea.green-tea.2") is (xxhash.xxh32_intdigest(b"tea.green-tea") % 10 == 0)


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (report(1.9, 1.4), 0),
        (report(1.4, 1.4), 1),
        (report(1.3, 1.4), 1),
        (report(1.9, 1.4, mismatches=1), 1),
    ],
)
def test_only_a_draft_that_beats_prompt_lookup_with_the_targets_own_answers_passes(
    script: ModuleType, found: dict[str, Any], wanted: int
) -> None:
    assert script.exit_code(found) == wanted


def test_the_verdict_shows_each_checkpoint_and_both_lengths(script: ModuleType) -> None:
    told = script.verdict(report(1.904, 1.401)).split("\n")
    assert told == [
        "step 40: acceptance length 1.90, accuracy 0.500 0.250",
        "reached 1.90 (aimed at 2.0); prompt lookup 1.40",
    ]

"""The report on a run's checkpoints: which draft is the last, and lengths for each kind of prompt."""

import pytest

from eaglefeed.cli.curve import HeldOut, report_on
from eaglefeed.consumer.decoding import Decoded
from eaglefeed.consumer.evaluate import Evaluation, PromptEvaluation

FOUND = HeldOut(["facts-001", "tea.green-tea.2", "tea.black-tea.1"], [[1], [2], [3]], [])


def evaluation(*accepted: tuple[int, ...], mismatches: int = 0) -> Evaluation:
    return Evaluation(tuple(PromptEvaluation(Decoded((5, 6), guesses), 0, mismatches) for guesses in accepted))


RESULTS = {
    "0": evaluation((0,), (0,), (0,)),
    "90": evaluation((1,), (4, 0), (2, 2)),
    "1200": evaluation((2,), (4, 1), (3, 2)),
    "prompt_lookup": evaluation((0, 0), (1,), (1,)),
}
ACCURACIES = {1200: [0.5, 0.25], 0: [0.0, 0.0], 90: [0.41237, 0.125]}


def test_the_curve_follows_the_steps_and_the_last_checkpoint_is_the_result() -> None:
    report = report_on(RESULTS, ACCURACIES, FOUND)
    assert [(row["step"], row["accept_length"]) for row in report["curve"]] == [(0, 1.0), (90, 2.8), (1200, 3.4)]
    assert report["curve"][1]["accuracies"] == [0.4124, 0.125]
    assert report["accept_length"]["all"] == 3.4
    assert report["num_prompts"] == 3


def test_each_kind_of_prompt_has_its_own_length_of_rounds_not_of_means() -> None:
    report = report_on(RESULTS, ACCURACIES, FOUND)
    assert report["accept_length"] == {"all": 3.4, "facts": 3.0, "tea": 3.5}
    assert report["prompt_lookup"] == {"all": 1.5, "facts": 1.0, "tea": 2.0}


@pytest.mark.parametrize("name", ["0", "1200", "prompt_lookup"])
def test_a_wrong_answer_counts_whoever_guessed(name: str) -> None:
    wrong = RESULTS | {name: evaluation((0,), (0,), (0,), mismatches=2)}
    assert report_on(wrong, ACCURACIES, FOUND)["mismatches"] == 6

"""`eaglefeed answers`: let the target answer prompts."""

from pathlib import Path
from typing import Annotated

import typer

from eaglefeed.cli.common import ConfigOption, JsonOption, TargetOption, emit, read_settings
from eaglefeed.cli.prompts import row_rules
from eaglefeed.cli.reports import describe_read, refusal_told

__all__ = ["answers"]


def answers(
    ctx: typer.Context,
    prompts: Annotated[Path, typer.Argument(help="JSONL with prompts: rows with `messages` that end in a user turn.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="JSONL to append conversations to.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens an answer may take.")] = 512,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts a forward.")] = 16,
    target: TargetOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Answer prompts with the target, greedily, so that a draft learns what its target says. Resumable."""
    settings = read_settings(ctx, config, target__name=target)
    from eaglefeed.cli.targets import target_model, target_tokenizer
    from eaglefeed.producer.answers import AnswerReport, answer_prompts

    report = AnswerReport()
    with refusal_told(report.read, prompts, as_json=as_json):
        answer_prompts(
            target_model(settings),
            target_tokenizer(settings),
            prompts,
            output,
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
            on_batch=lambda done: typer.echo(f"answered {done.answered}, {done.num_tokens} tokens", err=True),
            report=report,
            **row_rules(settings.feed),
        )
    document = {
        "answered": report.answered,
        "kept": report.kept,
        "cut_off": report.cut_off,
        "tokens": report.num_tokens,
    }
    line = (
        f"answered {report.answered} prompts ({report.cut_off} cut off at {max_new_tokens} tokens), {report.kept} were"
    )
    read, lines = describe_read(report.read, prompts)
    emit(as_json, document | read, [*lines, f"{line} answered before: {output}"])

"""`eaglefeed vocab`: choose the draft vocabulary."""

from pathlib import Path
from typing import Annotated

import typer

from eaglefeed.cli.common import ConfigOption, JsonOption, TargetOption, emit, read_settings
from eaglefeed.cli.prompts import row_rules
from eaglefeed.cli.reports import describe_read, refusal_told

__all__ = ["vocab"]


def vocab(
    ctx: typer.Context,
    conversations: Annotated[Path, typer.Argument(help="JSONL with finished conversations.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the map goes (safetensors: t2d, d2t).")],
    size: Annotated[int | None, typer.Option(min=1, help="Tokens of the draft vocabulary.")] = None,
    target: TargetOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Count the tokens that are trained on and keep the most frequent, special tokens always."""
    settings = read_settings(ctx, config, target__name=target, draft__vocab_size=size)
    from eaglefeed.cli.targets import target_tokenizer
    from eaglefeed.producer.counts import count_loss_tokens, stop_token_ids, unused_token_ids
    from eaglefeed.producer.jsonl import ReadReport
    from eaglefeed.producer.loading import reserved_token_ids, tokenizer_fingerprint
    from eaglefeed.producer.sizes import target_sizes
    from eaglefeed.schema.vocab import VocabMapping

    tokenizer, report = target_tokenizer(settings), ReadReport()
    name, cache_dir, trusts = settings.target.name, settings.target.cache_dir, settings.target.trust_remote_code
    sizes = target_sizes(name, cache_dir, trust_remote_code=trusts)
    width, longest = sizes.vocab_size, min(settings.feed.max_length, sizes.max_positions or settings.feed.max_length)
    stops = stop_token_ids(name, cache_dir, trust_remote_code=trusts)
    reserved = {*reserved_token_ids(tokenizer), *stops}
    with refusal_told(report, conversations, as_json=as_json):
        rules = row_rules(settings.feed)
        counts = count_loss_tokens(conversations, tokenizer, report, max_length=longest, vocab_size=width, **rules)
    mapping = VocabMapping.from_counts(
        counts,
        draft_vocab_size=settings.draft.vocab_size,
        vocab_size=width,
        always=(token for token in reserved if token < width),  # a tokenizer may have tokens that the target has not
        never=unused_token_ids(tokenizer, vocab_size=width),
    ).of_tokenizer(tokenizer_fingerprint(tokenizer))
    output.parent.mkdir(parents=True, exist_ok=True)
    mapping.save(output)
    document, lines = describe_read(report, conversations)
    coverage = mapping.coverage(counts)
    document |= {"size": mapping.draft_vocab_size, "coverage": coverage, "distinct": int((counts > 0).sum())}
    told = f"{output}: {mapping.draft_vocab_size} of {width} tokens, {coverage:.2%} of the tokens that are trained on"
    emit(as_json, document, [*lines, told])

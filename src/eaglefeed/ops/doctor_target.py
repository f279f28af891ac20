"""The doctor's look at the target: configuration and tokenizer without its weights, which are loaded when asked for.

V target vocabulary · D draft vocabulary
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eaglefeed.ops.doctor import Finding, Said, fail, look, ok, skipped, warn
from eaglefeed.ops.doctor_template import examine_mask, usable_probe, writes_a_date
from eaglefeed.ops.wording import human_bytes

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from transformers import PreTrainedTokenizerBase

    from eaglefeed.producer.engine import Eagle3Target
    from eaglefeed.producer.sizes import Encoding, TargetSizes

__all__ = ["TargetPlan", "examine_target"]

_READ_S, _LOAD_S = 60.0, 540.0
_MUCH = 2
"""How many times larger full logits must be before the doctor speaks of them."""


@dataclass(frozen=True)
class TargetPlan:
    """What the run wants of its target; the names are those of the settings.

    Args:
        name: of the target.
        dtype: that it runs in.
        cache_dir: where a converted GGUF is kept.
        trust_remote_code: run code that comes with it.
        aux_layer_ids: three 0-based decoder layers; None for the contract's.
        max_length: tokens a row is cut to.
        supervision: the encoding of samples.
        aux_storage: "same" or "fp8".
        vocab: the vocabulary map of producers, if there is one.
        draft_vocab: that of trainers, if they are given one.
        draft_vocab_size: D of a map that is not made yet.
        template_values: what its chat template is told.
        template_date: the date that it is told.
    """

    name: str
    dtype: str
    cache_dir: Path
    trust_remote_code: bool
    aux_layer_ids: tuple[int, int, int] | None
    max_length: int
    supervision: str
    aux_storage: str
    vocab: Path | None
    draft_vocab: Path | None
    draft_vocab_size: int
    template_values: Mapping[str, Any] = field(default_factory=dict)
    template_date: date | None = None


def examine_target(
    plan: TargetPlan, load: "Callable[[], AbstractContextManager[Eagle3Target]] | None" = None
) -> Iterator[Finding]:
    """Look at a target.

    Args:
        plan: what the run wants of it.
        load: opens it; None leaves its weights where they are.
    """
    sizes: list[TargetSizes] = []
    tokenizers: list[PreTrainedTokenizerBase] = []
    yield from look("target.config", partial(_config, plan, sizes, may_convert=load is not None), _READ_S)
    if not sizes:
        return
    yield from look("target.layers", partial(_layers, plan, sizes[0]))
    yield from look("target.dtype", partial(_dtype, plan))
    yield from look("target.vocab", partial(_vocab, plan, sizes[0]))
    yield from look("target.sizes", partial(_sizes, plan, sizes[0]))
    yield from look("target.template", partial(_template, plan, sizes[0], tokenizers), _READ_S)
    if tokenizers:
        yield from look("target.mask", partial(examine_mask, tokenizers[0]))
    if load is None:
        yield from look(
            "target.weights", lambda: [skipped("not loaded", "`eaglefeed doctor --load` does, and runs it")]
        )
    elif tokenizers:
        yield from look("target.weights", partial(_weights, load, tokenizers[0]), _LOAD_S)


def _config(plan: TargetPlan, found: "list[TargetSizes]", *, may_convert: bool) -> Iterator[Said]:
    from eaglefeed.producer.loading import is_prepared
    from eaglefeed.producer.sizes import target_sizes

    if not may_convert and not is_prepared(plan.name, plan.cache_dir):
        what = f"{plan.name} is a GGUF that the first command converts, once, into {plan.cache_dir}: some 20 s"
        yield skipped(what, "`eaglefeed doctor --load` does it now")
        return
    sizes = target_sizes(plan.name, plan.cache_dir, trust_remote_code=plan.trust_remote_code)
    found.append(sizes)
    what = f"{plan.name}: {sizes.num_layers} layers, hidden size {sizes.hidden_size}, {sizes.vocab_size} tokens"
    if sizes.max_positions is not None and plan.max_length > sizes.max_positions:
        fix = f"set feed.max_length={sizes.max_positions}, for feed, produce and train alike"
        yield warn(f"{what}; it takes {sizes.max_positions} positions, feed.max_length is {plan.max_length}", fix)
    else:
        yield ok(what)


def _layers(plan: TargetPlan, sizes: "TargetSizes") -> Iterator[Said]:
    from eaglefeed.producer.engine import checked_layer_ids

    ids = checked_layer_ids(plan.aux_layer_ids, sizes.num_layers)
    chosen = "by the contract's rule" if plan.aux_layer_ids is None else "as set"
    yield ok(f"outputs of decoder layers {', '.join(map(str, ids))} of 0 to {sizes.num_layers - 1}, {chosen}")


def _dtype(plan: TargetPlan) -> Iterator[Said]:
    from transformers import AutoConfig

    from eaglefeed.producer.loading import resolve_target

    source = resolve_target(plan.name, plan.cache_dir)
    config = AutoConfig.from_pretrained(source, trust_remote_code=plan.trust_remote_code).get_text_config()
    own = str(getattr(config, "dtype", None) or "unknown").removeprefix("torch.")
    if plan.dtype == "float16" and own == "bfloat16":
        fix = "set target.dtype=bfloat16: what exceeds 65504 becomes infinite in float16"
        yield warn("its checkpoint is bfloat16, target.dtype is float16", fix)
    else:
        yield ok(f"its checkpoint is {own}, target.dtype is {plan.dtype}")


def _vocab(plan: TargetPlan, sizes: "TargetSizes") -> Iterator[Said]:
    from eaglefeed.schema.vocab import VocabMapping

    given = {path for path in (plan.vocab, plan.draft_vocab) if path is not None}
    maps = {path: VocabMapping.load(path, vocab_size=sizes.vocab_size) for path in sorted(given)}
    for path, mapping in maps.items():
        yield ok(f"{path}: {mapping.draft_vocab_size} of the target's {sizes.vocab_size} tokens")
    if len({mapping.digest for mapping in maps.values()}) > 1:
        yield fail("produce.vocab and draft.vocab are different maps", "leave draft.vocab out: the run has its map")
    if plan.vocab is None and plan.supervision == "target_probs":
        yield fail("target_probs need a vocabulary map", "make one with `eaglefeed vocab` and pass it with --vocab")
    elif not maps:
        yield skipped(f"no vocabulary map, samples hold {plan.supervision}")


def _sizes(plan: TargetPlan, sizes: "TargetSizes") -> Iterator[Said]:
    from eaglefeed.producer.sizes import Encoding, sample_bytes
    from eaglefeed.schema.prompt import Prompt, PromptRow

    length = min(plan.max_length, sizes.max_positions or plan.max_length)
    row = PromptRow((0,) * length, (1,) * length)
    prompt = Prompt(
        sample_id="doctor", rows=(row,), tokenizer_fingerprint="", template_fingerprint="", max_length=length
    )
    draft = min(plan.draft_vocab_size, sizes.vocab_size)
    takes = {
        encoding: sample_bytes(prompt, sizes, encoding, dtype=plan.dtype)
        for encoding in (
            Encoding("logits"),
            Encoding("target_probs", draft_vocab_size=draft),
            Encoding("last_hidden_states"),
            Encoding("last_hidden_states", "fp8"),
        )
    }
    told = [f"{human_bytes(num_bytes)} as {_named(each)}" for each, num_bytes in takes.items()]
    what = f"a sample of {length} tokens takes {', '.join(told)}; this run: {plan.supervision}"
    if plan.supervision == "logits" and takes[Encoding("logits")] > _MUCH * takes[Encoding("last_hidden_states")]:
        yield warn(what, "set produce.supervision=last_hidden_states, which trains exactly the same")
    else:
        yield ok(f"{what}{' with aux in fp8' * (plan.aux_storage == 'fp8')}")


def _named(encoding: "Encoding") -> str:
    over = f" over {encoding.draft_vocab_size} tokens" * bool(encoding.draft_vocab_size)
    return f"{encoding.supervision}{over}{' with aux in fp8' * (encoding.aux_storage == 'fp8')}"


def _template(plan: TargetPlan, sizes: "TargetSizes", found: "list[PreTrainedTokenizerBase]") -> Iterator[Said]:
    from eaglefeed.producer.loading import load_tokenizer, template_fingerprint

    tokenizer = load_tokenizer(
        plan.name,
        cache_dir=plan.cache_dir,
        trust_remote_code=plan.trust_remote_code,
        template_values=plan.template_values,
        template_date=plan.template_date,
    )
    digest = template_fingerprint(tokenizer)
    if len(tokenizer) > sizes.vocab_size:
        what = f"its tokenizer has {len(tokenizer)} tokens, more than its head's {sizes.vocab_size}"
        yield fail(what, "use the tokenizer that the target was trained with")
        return
    found.append(tokenizer)
    if plan.template_date is None and writes_a_date(tokenizer):
        fix = "set target.chat_template_date, for answers, feed, produce and train alike"
        yield warn("its chat template writes each day's date: rows fed again on another day are others", fix)
    yield ok(f"a chat template and a fast tokenizer of {len(tokenizer)} tokens (digest {digest[:8]})")


def _weights(
    load: "Callable[[], AbstractContextManager[Eagle3Target]]", tokenizer: "PreTrainedTokenizerBase"
) -> Iterator[Said]:
    import torch

    chat = usable_probe(tokenizer).tokens
    ids, loss = torch.tensor([chat.input_ids]), torch.tensor([chat.loss_mask])
    with load() as target:
        aux = target.generate_batch(ids, torch.ones_like(ids), loss).aux_hidden_states
        largest = float(aux.float().abs().max())
        where = f"{target.engine} on {target.device}"
    if not math.isfinite(largest):
        yield fail(f"{where}: its states are not finite", "set target.dtype=bfloat16, or check the checkpoint")
    else:
        yield ok(f"{where}: loaded, and answers a probe of {ids.shape[1]} tokens (largest state {largest:.3g})")

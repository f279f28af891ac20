"""A stream that has the run's whole contract trains on nothing that differs from it, whatever id a ref carries."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import pipeline
import samples
from eaglefeed.consumer.expand import TargetHead
from eaglefeed.consumer.stream import SampleStream
from eaglefeed.errors import ConfigError
from eaglefeed.queue.base import QueueItem
from eaglefeed.schema.contract import RunContract
from eaglefeed.schema.eagle3_compact import encode_compact
from eaglefeed.schema.refs import encode_ref
from eaglefeed.storage.memory import MemoryStore

SUPERVISION = ("logits", "target_probs", "last_hidden_states")
FORMS = list(itertools.product(("same", "fp8"), ("all", "supervised")))


def valid(supervision: str) -> dict[str, Tensor]:
    """Features whose values are right as well."""
    features = samples.tensors(supervision=supervision)
    features[supervision][:, -1] = 0  # shifted: nothing comes after the last token
    return features


def contract(supervision: str, /, **changes: object) -> RunContract:
    """That of samples.tensors."""
    compact = {"head_digest": "h", "schema_version": 2} if supervision == "last_hidden_states" else {}
    fields = {"target_fingerprint": "target", "dtype": "bfloat16", "vocab_size": samples.V, "supervision": supervision}
    return pipeline.contract(**(fields | compact | changes))


def head(supervision: str) -> TargetHead | None:
    if supervision != "last_hidden_states":
        return None
    weight = torch.ones(samples.V, samples.H, dtype=torch.bfloat16)
    return TargetHead({"lm_head.weight": weight}, {}, torch.ones(samples.V, dtype=torch.bool))


def streamed(own: RunContract | str, stored: dict[str, Tensor], of: RunContract, **options: Any) -> tuple[int, str]:
    """How many samples a stream of `own` gives of one sample that carries its id, and why it refused it.

    `of` says what the sample is.
    """
    run = pipeline.Run(clock=pipeline.TurnableClock(), store=MemoryStore(verify="never"))
    features = options.pop("features", None) or valid(of.supervision)
    carried = own if isinstance(own, str) else own.id
    ref = samples.ref(features, contract=carried, target_model_version=of.target_fingerprint)
    run.samples.put([QueueItem("a-1", encode_ref(run.store.put(ref, stored)))])
    run.samples.close()
    with SampleStream(
        run.samples, run.store, consumer="t", contract=own, head=head(of.supervision), clock=run.clock, **options
    ) as stream:
        seen = sum(1 for _ in stream)
    return seen, "".join(letter.reason for letter in run.samples.dead_letters())


def test_an_id_beyond_the_vocabulary_is_refused_in_every_encoding() -> None:
    for supervision, token in itertools.product(SUPERVISION, (2**40, samples.V, -1)):
        own, features = contract(supervision), valid(supervision)
        assert streamed(own, features, own) == (1, "")
        features["input_ids"][0, 0] = token
        seen, reason = streamed(own, features, own, features=features)
        assert (seen, "input_ids: not from 0 to 10" in reason) == (0, True), (supervision, token)


@pytest.mark.parametrize("told", FORMS)
@pytest.mark.parametrize("form", FORMS)
def test_a_shard_that_is_stored_otherwise_than_the_contract_says_is_refused(
    told: tuple[str, str], form: tuple[str, str]
) -> None:
    options = [dict(zip(("aux_storage", "supervision_rows"), each, strict=True)) for each in (told, form)]
    own = contract("last_hidden_states", **options[0])
    features = valid("last_hidden_states")
    stored = encode_compact(features, fp8_aux=form[0] == "fp8", supervised_rows=form[1] == "supervised")
    seen, reason = streamed(own, stored, own)
    differing = [name for name in options[0] if options[0][name] != options[1][name]]
    assert seen == (not differing)
    assert ("ContractMismatch: a-1: differs from the run's contract" in reason) == bool(differing)
    for name in differing:
        assert f"{name}={options[0][name]}" in reason.partition(", got ")[0]
        assert f"{name}={options[1][name]}" in reason.partition(", got ")[2]
    assert streamed(own.id, stored, own) == (1, "")


@pytest.mark.parametrize(
    ("supervision", "field", "value"),
    [
        ("target_probs", "dtype", "float32"),
        ("target_probs", "target_fingerprint", "another"),
        ("target_probs", "supervision", "logits"),
    ],
)
def test_whatever_a_sample_shows_of_the_contract_must_be_so(supervision: str, field: str, value: object) -> None:
    is_it = contract(supervision)
    seen, reason = streamed(contract(supervision, **{field: value}), valid(supervision), is_it)
    assert seen == 0
    assert f"wanted {field}={value}, got {field}={getattr(is_it, field)}" in reason


@pytest.mark.parametrize(
    ("field", "value", "feature", "widths"),
    [
        ("hidden_size", 8, "aux_hidden_states", "wanted 24 (3 layers of hidden_size 8), got 12;"),
        ("vocab_size", 12, "logits", "wanted 12 (vocab_size), got 11;"),
    ],
)
def test_states_and_logits_are_as_wide_as_the_contracts_target(
    field: str, value: int, feature: str, widths: str
) -> None:
    seen, reason = streamed(contract("logits", **{field: value}), valid("logits"), contract("logits"))
    assert seen == 0
    assert f"{feature} of another width than the run's contract says, {widths}" in reason


@pytest.mark.parametrize(("needs", "given"), [("logits", "last_hidden_states"), ("last_hidden_states", "logits")])
def test_a_head_that_does_not_fit_the_contract_costs_no_sample(needs: str, given: str) -> None:
    run = pipeline.Run(clock=pipeline.TurnableClock())
    with pytest.raises(ConfigError, match=r"load_run_assets\(store\).head\(\)"):
        SampleStream(run.samples, run.store, consumer="t", contract=contract(needs), head=head(given))
    assert run.samples.stats().workers == {}

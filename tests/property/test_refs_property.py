"""Refs and headers under anything that can come in."""

import contextlib
import json
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import samples
from eaglefeed.errors import EaglefeedError, SchemaError
from eaglefeed.schema.eagle3 import validate_eagle3_ref
from eaglefeed.schema.prompt import Prompt, PromptRow, decode_prompt, encode_prompt
from eaglefeed.schema.refs import DTYPE_BYTES, FeatureAlgorithm, FeatureSpec, SampleRef, decode_ref, encode_ref
from eaglefeed.storage.header import parse_header, ref_of
from eaglefeed.storage.shard import encode_shard

names = st.text("abcdefghij_0123456789", min_size=1, max_size=20)
specs = st.builds(
    FeatureSpec, st.lists(st.integers(0, 2**20), max_size=8).map(tuple), st.sampled_from(sorted(DTYPE_BYTES))
)
ids = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,60}\Z")


@st.composite
def refs(draw: st.DrawFn) -> SampleRef:
    features = draw(st.dictionaries(names, specs, max_size=8))
    keys = draw(st.fixed_dictionaries({name: st.text(max_size=40) for name in features}))
    return SampleRef(
        sample_id=draw(ids),
        run_id=draw(st.text(max_size=30)),
        store_uri=draw(st.sampled_from(["mem://x", "file:///a b", "s3://bucket/ü"])),
        feature_keys=draw(st.sampled_from([keys, dict.fromkeys(features, "one")])),
        feature_specs=features,
        algorithm=draw(st.sampled_from(list(FeatureAlgorithm))),
        schema_version=draw(st.integers(0, 9)),
        num_tokens=draw(st.integers(0, 2**40)),
        estimated_bytes=draw(st.integers(0, 2**50)),
        target_model_version=draw(st.text(max_size=20)),
        draft_weight_version=draw(st.text(max_size=20)),
        checksums={name: "ab" for name in features if draw(st.booleans())},
        contract=draw(st.text(max_size=20)),
        stored_bytes=draw(st.integers(0, 2**50)),
    )


@given(refs())
def test_any_ref_survives_its_wire_form(ref: SampleRef) -> None:
    again = decode_ref(encode_ref(ref))
    assert again == ref
    assert list(again.feature_specs) == list(ref.feature_specs)


@given(st.binary(max_size=400))
def test_no_bytes_crash_the_decoder(data: bytes) -> None:
    with pytest.raises(SchemaError):
        decode_ref(data)


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_a_changed_byte_gives_a_ref_or_a_schema_error(position: int, value: int) -> None:
    data = bytearray(encode_ref(samples.ref()))
    data[position % len(data)] = value
    with contextlib.suppress(SchemaError):
        validate_eagle3_ref(decode_ref(bytes(data)))


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 2**31 - 1), st.integers(0, 1)), min_size=1, max_size=9),
        min_size=1,
        max_size=4,
    )
)
def test_any_prompt_survives_its_wire_form(rows: list[list[tuple[int, int]]]) -> None:
    made = tuple(PromptRow(tuple(i for i, _ in row), tuple(m for _, m in row)) for row in rows)
    prompt = Prompt(sample_id="a", rows=made, tokenizer_fingerprint="t", template_fingerprint="p", max_length=9)
    assert decode_prompt(encode_prompt(prompt)) == prompt


@settings(max_examples=300)
@given(st.integers(0, 10**6), st.integers(0, 255), st.integers(0, 10**6))
def test_a_mutated_shard_is_read_right_or_refused(position: int, value: int, cut: int) -> None:
    ref, data = encode_shard(samples.ref(), samples.tensors())
    mutated = bytearray(data)
    mutated[position % 1200] = value  # the header lies there
    mutated = mutated[: len(data) - cut % 3]
    try:
        found = ref_of(parse_header(mutated, len(mutated), "x"), ref.store_uri, "x")
        validate_eagle3_ref(found)
    except EaglefeedError:
        return
    assert found.feature_specs == ref.feature_specs


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
        max_leaves=8,
    )
)
def test_any_json_as_a_header_is_refused_or_read(value: object) -> None:
    text = json.dumps(value).encode()
    data = struct.pack("<Q", len(text)) + text
    with contextlib.suppress(EaglefeedError):
        parse_header(data, len(data), "x")

"""A look at a dead letter never fails, whatever its payload and its words are."""

import json
from typing import Any

import msgpack
from hypothesis import given
from hypothesis import strategies as st

from eaglefeed.cli.letters import describe_payload, one_line

WIRE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)
PROMPT = {"v": 1, "id": "a", "rows": [[b"\1\0\0\0", b"\1"]], "tokenizer": "", "template": "", "max_length": 5}


@given(queue=st.sampled_from(["prompts", "samples"]), payload=st.binary() | WIRE.map(msgpack.packb))
def test_no_payload_can_break_the_look_at_it(queue: str, payload: bytes) -> None:
    json.dumps(describe_payload(queue, payload))


@given(field=st.sampled_from(sorted(PROMPT)), value=WIRE)
def test_no_field_of_a_prompt_can_break_the_look_at_it(field: str, value: Any) -> None:
    json.dumps(describe_payload("prompts", msgpack.packb(PROMPT | {field: value})))


@given(st.text())
def test_what_comes_from_data_stays_on_its_line_and_moves_no_cursor(text: str) -> None:
    assert one_line(text).isprintable()

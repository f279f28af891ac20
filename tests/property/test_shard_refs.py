"""A shard whose own ref is wrong although its digest fits: one clear error, of whichever version it says it is."""

import json
import random
import struct

import pytest
import xxhash

import samples
from eaglefeed.errors import SampleCorrupt
from eaglefeed.schema.eagle3_compact import encode_compact
from eaglefeed.storage.header import keyed_ref, parse_header
from eaglefeed.storage.shard import encode_shard
from property.test_shards import JSON_VALUES

NUM_REFS = 2000


def _resealed(data: bytearray, dice: random.Random) -> bytearray:
    """Change, remove or rename something in a shard's own ref, under a digest that fits: a writer's fault."""
    start = 8 + int.from_bytes(data[:8], "little")
    root = json.loads(data[8:start])
    metadata = root["__metadata__"]
    ref = json.loads(metadata["eaglefeed_ref"])
    node = ref[dice.choice(["feature_specs", "feature_keys"])] if dice.random() < 0.5 else ref
    key = dice.choice(sorted(node))
    change = dice.randrange(4)
    if change == 0:
        node.pop(key)
    elif change == 1:
        node[dice.choice(["x", "last_hidden_states", "target_argmax", "input_ids"])] = node.pop(key)
    else:
        node[key] = dice.choice([*JSON_VALUES, 2, 3, {"shape": [1, 4], "dtype": "int32"}])
    if dice.random() < 0.3:
        ref["schema_version"] = dice.choice([0, 1, 2, 3, -1])
    metadata["eaglefeed_ref"] = json.dumps(ref)
    metadata["eaglefeed_ref_xxh3_128"] = xxhash.xxh3_128_hexdigest(metadata["eaglefeed_ref"].encode())
    text = json.dumps(root)
    return bytearray(struct.pack("<Q", len(text)) + text.encode() + data[start:])


@pytest.mark.parametrize("form", ["version 1", "version 2", "version 2, encoded"])
def test_a_shard_whose_own_ref_is_impossible_is_corrupt_whatever_its_version(form: str) -> None:
    supervision = "target_probs" if form == "version 1" else "last_hidden_states"
    features = samples.tensors(batch=1, length=4, supervision=supervision)
    ref = samples.ref(features, num_tokens=4)
    if form.endswith("encoded"):
        features = encode_compact(features, fp8_aux=True, supervised_rows=True)
    _, whole = encode_shard(ref, features)
    outcomes = {"read": 0, "corrupt": 0}
    for seed in range(NUM_REFS):
        data = _resealed(bytearray(whole), random.Random(seed))
        try:
            keyed_ref(parse_header(data, len(data), "x"), "mem://test", ref.feature_keys["input_ids"])
            outcomes["read"] += 1
        except SampleCorrupt as error:
            outcomes["corrupt"] += 1
            str(error).encode()
        except BaseException as error:
            raise AssertionError(f"seed {seed}") from error
    assert min(outcomes.values()) > NUM_REFS // 100, "a renamed run is a ref as any other"

"""Any tensors, in any layout, come back bit for bit and other programs read them; any damage is one clear error."""

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import xxhash
from hypothesis import given, settings
from safetensors import safe_open
from torch import Tensor

import samples
from eaglefeed.errors import EaglefeedError, SampleCorrupt, SchemaError
from eaglefeed.schema.refs import DTYPE_BYTES, FeatureSpec
from eaglefeed.storage import shard
from eaglefeed.storage.buffers import BufferRing
from eaglefeed.storage.header import parse_header, ref_of
from eaglefeed.storage.shard import decode_shard, encode_shard

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=12).filter(
    lambda name: name != "__metadata__"
)
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def _plain(tensor: Tensor) -> Tensor:
    return tensor


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": _plain,
    "axes reversed": lambda tensor: tensor.permute(tuple(reversed(range(tensor.ndim)))),
    "every other": lambda tensor: tensor[::2] if tensor.ndim else tensor,
    "a view with an offset": lambda tensor: tensor[1:] if tensor.ndim else tensor,
    "expanded": lambda tensor: tensor.unsqueeze(0).expand(3, *tensor.shape),
    "one column": lambda tensor: tensor[..., 0] if tensor.ndim and tensor.shape[-1] else tensor,
    "0-dim out of a row": lambda tensor: tensor.flatten()[-1] if tensor.numel() else tensor,
    "with a gradient": lambda tensor: tensor.requires_grad_() if tensor.dtype == torch.float32 else tensor,
}


@st.composite
def _tensors(draw: st.DrawFn) -> Tensor:
    name, shape = draw(st.sampled_from(sorted(DTYPE_BYTES))), draw(SHAPES)
    num_bytes = FeatureSpec(shape, name).num_bytes
    data = torch.tensor(list(random.Random(draw(st.integers(0, 99))).randbytes(num_bytes)), dtype=torch.uint8)
    if name == "bool":
        data %= 2
    tensor = (
        data.view(getattr(torch, name)).reshape(shape) if num_bytes else torch.empty(shape, dtype=getattr(torch, name))
    )
    return LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))](tensor)


def _bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().clone(memory_format=torch.contiguous_format).flatten()
    return bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""


@settings(max_examples=250, deadline=None)
@given(features=st.dictionaries(NAMES, _tensors(), min_size=1, max_size=5), chunk_bytes=st.sampled_from([1, 7, 4096]))
def test_any_tensors_come_back_bit_for_bit_and_other_programs_read_them(
    tmp_path_factory: pytest.TempPathFactory, features: dict[str, Tensor], chunk_bytes: int
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shard, "CHUNK_BYTES", chunk_bytes)
        ref, data = encode_shard(samples.ref(features), features)
    assert ref.checksums == {name: xxhash.xxh3_128_hexdigest(_bytes(tensor)) for name, tensor in features.items()}
    assert ref.stored_bytes == len(data)
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    path.write_bytes(data)
    with safe_open(path, framework="pt") as theirs:
        for found in (decode_shard(ref, data), decode_shard(ref, bytes(data), ring=BufferRing(1))):
            assert list(found) == list(features)
            for name, tensor in features.items():
                other = theirs.get_tensor(name)
                assert found[name].shape == other.shape == tensor.shape
                assert found[name].dtype == other.dtype == tensor.dtype
                assert _bytes(found[name]) == _bytes(other) == _bytes(tensor)
    header = parse_header(data, len(data), "x")
    assert header.data_start % 64 == 0
    assert all(entry.begin % DTYPE_BYTES[entry.spec.dtype] == 0 for entry in header.tensors.values())
    assert ref_of(header, ref.store_uri, "x") == ref


def test_a_tensor_called_like_the_header_s_own_entry_is_refused() -> None:
    features = {"__metadata__": torch.zeros(1)}
    with pytest.raises(SchemaError, match="wanted another name, got __metadata__"):
        encode_shard(samples.ref(features), features)


NUM_DAMAGES = 10_000
JSON_VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, 10**400, 0.0, 1.0, float("nan"), float("inf"), "", "F32", "BOOL",
    "F8_E4M3", "\ud800", [], [0], [0, 0], [1, 0], [-8, 0], [0, True], [2**62, 2**62, 0], [1] * 9, {},
    {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]},
]  # fmt: skip


def _flip(data: bytearray, dice: random.Random) -> bytearray:
    start = 8 + int.from_bytes(data[:8], "little")
    for _ in range(dice.choice([1, 1, 2, 5])):
        place = dice.randrange(dice.choice([8, start, start, len(data)]))
        data[place] ^= 1 << dice.randrange(8) if dice.random() < 0.5 else dice.randrange(1, 256)
    return data


def _cut(data: bytearray, dice: random.Random) -> bytearray:
    return data[: dice.randrange(len(data))]


def _lengthen(data: bytearray, dice: random.Random) -> bytearray:
    place = dice.randrange(len(data) + 1)
    return data[:place] + dice.randbytes(dice.randrange(1, 70)) + data[place:]


def _swap_pieces(data: bytearray, dice: random.Random) -> bytearray:
    first, size = dice.randrange(len(data) - 64), dice.randrange(1, 64)
    second = dice.randrange(len(data) - 64)
    data[first : first + size], data[second : second + size] = data[second : second + size], data[first : first + size]
    return data


def _other_length(data: bytearray, dice: random.Random) -> bytearray:
    length = int.from_bytes(data[:8], "little")
    data[:8] = struct.pack("<Q", dice.choice([0, 1, length - 1, length + 1, length + 64, len(data), 2**32, 2**64 - 1]))
    return data


def _edit(data: bytearray, dice: random.Random) -> bytearray:
    """Change, remove, rename or double one entry somewhere in the header's JSON, and keep the length field right."""
    start = 8 + int.from_bytes(data[:8], "little")
    root = json.loads(data[8:start])
    places: list[tuple[Any, Any]] = []

    def collect(node: Any) -> None:
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            places.append((node, key))
            if isinstance(value, dict | list):
                collect(value)

    collect(root)
    node, key = dice.choice(places)
    change = dice.randrange(5)
    if change == 0:
        node.pop(key)
    elif change == 1 and isinstance(node, dict):
        node[dice.choice(["", "x", "input_ids", "loss_mask", "__metadata__", "dtype"])] = node.pop(key)
    elif change == 2:
        other, other_key = dice.choice(places)
        node[key], other[other_key] = other[other_key], node[key]
    else:
        node[key] = dice.choice(JSON_VALUES)
    text = json.dumps(root)
    if change == 4:  # the same name twice
        text = text.replace('"attention_mask"', '"loss_mask"', 1)
    return bytearray(struct.pack("<Q", len(text)) + text.encode() + data[start:])


DAMAGES = [_flip, _flip, _cut, _lengthen, _swap_pieces, _other_length, _edit, _edit, _edit, _edit]


@pytest.mark.parametrize(("supervision", "share"), [("target_probs", 1), ("last_hidden_states", 4)])
def test_no_damaged_file_crashes_or_gives_a_wrong_tensor(supervision: str, share: int) -> None:
    features = samples.tensors(batch=1, length=4, supervision=supervision)
    ref, whole = encode_shard(samples.ref(features, num_tokens=4), features)
    wanted = {name: _bytes(tensor) for name, tensor in features.items()}
    outcomes = {"same": 0, "corrupt": 0}
    for seed in range(NUM_DAMAGES // share):
        dice = random.Random(seed)
        try:
            data = DAMAGES[seed % len(DAMAGES)](bytearray(whole), dice)
        except (RecursionError, ValueError, TypeError, KeyError, IndexError):
            continue  # an edit that JSON cannot express, such as an entry put into itself
        outcomes[_outcome(lambda data=data: decode_shard(ref, data), wanted, seed)] += 1
        _described(data, ref, seed)
    assert outcomes["corrupt"] > 0.8 * NUM_DAMAGES // share
    assert outcomes["same"] > 0  # a space for a tab, an entry that was moved within its object


def _outcome(read: Callable[[], dict[str, Tensor]], wanted: dict[str, bytes], seed: int) -> str:
    try:
        found = read()
    except SampleCorrupt as error:
        _check_error(error, seed)
        return "corrupt"
    except BaseException as error:
        raise AssertionError(f"seed {seed}") from error
    assert {name: _bytes(tensor) for name, tensor in found.items()} == wanted, f"seed {seed}"
    return "same"


def _described(data: bytearray, ref: object, seed: int) -> None:
    try:
        found = ref_of(parse_header(data, len(data), "a-1"), "mem://test", "a-1")
    except SampleCorrupt as error:
        _check_error(error, seed)
    except BaseException as error:
        raise AssertionError(f"seed {seed}") from error
    else:
        assert (found.sample_id, found.contract, found.num_tokens) == ("a-1", "0123456789abcdef", 4), f"seed {seed}"


def _check_error(error: EaglefeedError, seed: int) -> None:
    text = str(error)
    assert text.startswith("a-1: "), f"seed {seed}: {text}"
    assert "\n" not in text, f"seed {seed}"
    assert len(text) < 2000, f"seed {seed}"
    text.encode()


@pytest.mark.parametrize(
    "entry",
    [
        '{"dtype":"I64","shape":[1],"data_offsets":[0,8],"more":1}',
        '{"dtype":"I64","shape":[true],"data_offsets":[0,8]}',
        '{"dtype":"I64","shape":[1.0],"data_offsets":[0,8]}',
        '{"dtype":"I64","shape":[1],"data_offsets":[0,8.0]}',
        '{"dtype":"I64","shape":[1],"data_offsets":[false,8]}',
        '{"dtype":"I64","shape":[1],"data_offsets":[-8,0]}',
        '{"dtype":"I64","shape":[1],"data_offsets":[0,8,8]}',
        '{"dtype":"I64","shape":[-1],"data_offsets":[8,0]}',
        '{"dtype":"I64","shape":[NaN],"data_offsets":[0,8]}',
        '{"dtype":"I64","shape":[Infinity],"data_offsets":[0,8]}',
        '{"dtype":"I64","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,8]}',
        '{"dtype":"U64","shape":[1],"data_offsets":[0,8]}',
        '{"dtype":["I64"],"shape":[1],"data_offsets":[0,8]}',
        '{"dtype":"I64","shape":[1],"data_offsets":[0,8]},"a":{"dtype":"I64","shape":[1],"data_offsets":[0,8]}',
        '{"dtype":"I64","shape":[1],"data_offsets":[0,8],"dtype":"I64"}',
        '{"dtype":"I64","shape":[1],"data_offsets":[0,8]},"b":{"dtype":"I8","shape":[18446744073709551616,0],"data_offsets":[8,8]}',
        '{"dtype":"I64","shape":[1],"data_offsets":[0,8]},"\\ud800":{"dtype":"I8","shape":[0],"data_offsets":[8,8]}',
        '{"dtype":"I64","shape":[1],"data_offsets":[0,8]},"__metadata__":{"a":1}',
        '{"dtype":"I64","shape":[1],"data_offsets":[0,8]},"__metadata__":null',
        "[" * 100_000,
        "9" * 5000,
    ],
)  # fmt: skip
def test_a_header_that_is_not_exactly_right_is_corrupt(entry: str) -> None:
    text = f'{{"a":{entry}}}'.encode()
    data = struct.pack("<Q", len(text)) + text + bytes(8)
    with pytest.raises(SampleCorrupt) as caught:
        parse_header(data, len(data), "x")
    str(caught.value).encode()


def test_a_damaged_shard_keeps_no_buffer_even_while_its_error_is_kept() -> None:
    features = samples.tensors()
    ref, data = encode_shard(samples.ref(features), features)
    data[-1] ^= 1
    ring = BufferRing(1)
    with pytest.raises(SampleCorrupt, match="checksum of position_mask differs") as caught:
        decode_shard(ref, data, ring=ring)
    assert ring.held() == []
    assert caught.value.sample_id == "a-1"


def test_damage_on_disk_is_found_the_same_way(tmp_path: Path) -> None:
    from eaglefeed.storage.shared_dir import SharedDirStore

    store = SharedDirStore(tmp_path, durability="none")
    features = samples.tensors(batch=1, length=4)
    ref = store.put(samples.ref(features, num_tokens=4), features)
    path = tmp_path / ref.feature_keys["input_ids"]
    whole, wanted = path.read_bytes(), {name: _bytes(tensor) for name, tensor in features.items()}
    ring = BufferRing(1, deadline_s=0)
    for seed in range(0, NUM_DAMAGES, 25):
        data = DAMAGES[seed // 25 % 6](bytearray(whole), random.Random(seed))
        path.write_bytes(data)
        _outcome(lambda: store.get(ref, ring), wanted, seed)
        assert ring.held() == []
    store.close()

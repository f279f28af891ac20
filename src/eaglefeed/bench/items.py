"""Items like those of a run: an encoded ref of a sample with seven features, under an id of 32 characters."""

from functools import cache

from eaglefeed.queue.base import QueueItem
from eaglefeed.schema.refs import FeatureAlgorithm, FeatureSpec, SampleRef, encode_ref

__all__ = ["PAYLOAD_BYTES", "make_items"]

_TOKENS = 2048
_FEATURES = {
    "aux_hidden_states": FeatureSpec((1, _TOKENS, 12_288), "bfloat16"),
    "input_ids": FeatureSpec((1, _TOKENS), "int64"),
    "attention_mask": FeatureSpec((1, _TOKENS), "int64"),
    "loss_mask": FeatureSpec((1, _TOKENS), "int64"),
    "target_probs": FeatureSpec((1, _TOKENS, 32_000), "bfloat16"),
    "position_mask": FeatureSpec((1, _TOKENS, 1), "bool"),
    "position_ids": FeatureSpec((1, _TOKENS), "int64"),
}
_NO_ID = "0" * 32


@cache
def _template() -> tuple[bytes, int]:
    """An encoded ref whose id is _NO_ID, and the bytes that its shard takes."""
    num_bytes = sum(spec.num_bytes for spec in _FEATURES.values())
    ref = SampleRef(
        sample_id=_NO_ID,
        run_id="qwen3-8b-ultrachat",
        store_uri="file:///mnt/features/qwen3-8b-ultrachat",
        feature_keys=dict.fromkeys(_FEATURES, f"0c/{_NO_ID}.1764485930123000.safetensors"),
        feature_specs=_FEATURES,
        algorithm=FeatureAlgorithm.EAGLE3,
        schema_version=1,
        num_tokens=_TOKENS - 31,
        estimated_bytes=num_bytes,
        target_model_version="sha256:" + "5e" * 32,
        draft_weight_version="",
        checksums=dict.fromkeys(_FEATURES, "9d" * 16),
        contract="0123456789abcdef",
        stored_bytes=num_bytes,
    )
    return encode_ref(ref), num_bytes


PAYLOAD_BYTES = len(_template()[0])


def make_items(count: int, *, start: int = 0, stored: bool = True) -> list[QueueItem]:
    """Items number `start` and following; `stored` ones have a shard, and wait for its deletion once they are done."""
    payload, stored_bytes = _template()
    items = []
    for number in range(start, start + count):
        item_id = f"{number:032x}"
        body = payload.replace(_NO_ID.encode(), item_id.encode())
        items.append(QueueItem(item_id, body, stored_bytes if stored else 0))
    return items

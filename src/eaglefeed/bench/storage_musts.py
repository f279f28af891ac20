"""The bounds that the stores must hold, each for one figure."""

from eaglefeed.bench.musts import Must, median_of, ratio_of
from eaglefeed.bench.storage_memory import PRODUCER_RING, TRAINER_RING
from eaglefeed.bench.storage_peers import NEMO

__all__ = ["PEER_MUSTS", "STORAGE_MUSTS"]

PEER_MUSTS = (
    Must("put_over_nemo_automodel", 5.0, "higher", ratio_of("put.eaglefeed", f"put.{NEMO}")),
    Must("get_over_nemo_automodel", 5.0, "higher", ratio_of("get_hot.eaglefeed", f"get_hot.{NEMO}")),
)
STORAGE_MUSTS = (
    Must("write_over_memmove", 0.35, "higher", ratio_of("put.eaglefeed", "memmove")),
    Must("write_over_save_file", 1.25, "higher", ratio_of("put.eaglefeed", "put.safetensors")),
    Must("hot_read_over_memmove", 0.60, "higher", ratio_of("get_hot.eaglefeed", "memmove")),
    Must("cold_read_over_load_file", 1.4, "higher", ratio_of("get_cold.eaglefeed", "get_cold.safetensors")),
    Must("bytes_a_token_last_hidden_states", 33_000, "lower", median_of("encoding.last_hidden_states.stored_a_token")),
    Must("bytes_a_token_fp8_aux", 21_000, "lower", median_of("encoding.fp8_aux.stored_a_token")),
    Must("producer_memory_samples", PRODUCER_RING + 1, "lower", median_of("memory.producer")),
    Must("trainer_memory_samples", TRAINER_RING + 1, "lower", median_of("memory.trainer")),
)

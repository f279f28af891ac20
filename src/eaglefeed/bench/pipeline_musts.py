"""The bounds that streaming must hold, each for one figure."""

from eaglefeed.bench.musts import Must, median_of

__all__ = ["PIPELINE_MUSTS"]

PIPELINE_MUSTS = (
    Must("draft_wait_share", 0.02, "lower", median_of("draft.wait_share")),
    Must("device_wait_share", 0.02, "lower", median_of("device.wait_share")),
    Must("draft_stream_over_memory", 1.05, "lower", median_of("draft.stream_over_memory")),
    Must("device_stream_over_memory", 1.05, "lower", median_of("device.stream_over_memory")),
    Must("device_observed_over_plain", 1.01, "lower", median_of("device.observed_over_plain")),
)

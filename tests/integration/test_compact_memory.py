"""What a stream holds of a sample of schema version 2: its buffer, or what was decoded of it."""

import weakref
from typing import Any

import pytest
import torch

import pipeline
import samples
from eaglefeed.consumer import stream as stream_module
from eaglefeed.consumer.expand import TargetHead
from eaglefeed.consumer.stream import SampleStream
from eaglefeed.queue.base import QueueItem
from eaglefeed.schema.eagle3_compact import encode_compact
from eaglefeed.schema.refs import encode_ref
from eaglefeed.storage.buffers import BufferRing

NUM_SAMPLES, H = 3, 64


class _Rings(list[BufferRing]):
    """Every ring that a stream makes."""

    def __call__(self, *args: Any, **options: Any) -> BufferRing:
        self.append(BufferRing(*args, **options))
        return self[-1]


def _stored(**options: bool) -> pipeline.Run:
    """A run of samples so wide that their states outweigh ids and masks."""
    run, features = pipeline.Run(clock=pipeline.TurnableClock()), samples.tensors(supervision="last_hidden_states")
    for name in ("aux_hidden_states", "last_hidden_states"):
        features[name] = features[name].repeat(1, 1, H // samples.H)
    for number in range(NUM_SAMPLES):
        ref = samples.ref(features, sample_id=f"a-{number}")
        ref = run.store.put(ref, encode_compact(features, **options))
        run.samples.put([QueueItem(ref.sample_id, encode_ref(ref))])
    run.samples.close()
    return run


@pytest.mark.parametrize(("fp8", "num_held"), [(False, NUM_SAMPLES), (True, 0)])
@pytest.mark.parametrize("rows", [False, True])
def test_a_decoded_fp8_sample_holds_no_buffer_and_dies_with_its_batch(
    fp8: bool, num_held: int, rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, rings = _stored(fp8_aux=fp8, supervised_rows=rows), _Rings()
    monkeypatch.setattr(stream_module, "BufferRing", rings)
    weight = torch.ones(samples.V, H, dtype=torch.bfloat16)
    head = TargetHead({"lm_head.weight": weight}, {}, torch.ones(samples.V, dtype=torch.bool))
    with SampleStream(run.samples, run.store, consumer="t", head=head, clock=run.clock) as stream:
        kept = stream.take(NUM_SAMPLES)
        assert len(kept) == NUM_SAMPLES
        assert len(rings[0].held()) == num_held
        died = weakref.ref(kept[0].aux_hidden_states)
        kept.clear()
        assert died() is None
        assert rings[0].held() == []

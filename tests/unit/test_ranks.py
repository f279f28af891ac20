"""The only rank of a job, and how tensors are put together before they are sent."""

import torch

from eaglefeed.consumer import ranks
from eaglefeed.consumer.ranks import Ranks


def test_the_only_rank_does_everything_in_place() -> None:
    alone = Ranks.alone()
    tensor = torch.tensor([1.0, 2.0])
    alone.sum([tensor])
    alone.share([tensor])
    assert tensor.tolist() == [1.0, 2.0]
    assert alone.tell(b"word") == b"word"
    assert alone.hand_out([b"part"]) == b"part"
    assert alone.collect(b"part") == [b"part"]
    assert (alone.rank, alone.world_size, alone.is_first) == (0, 1, True)
    alone.close()


def test_the_only_rank_does_not_touch_torch_distributed() -> None:
    with Ranks.alone() as alone:
        alone.tell()
        assert not torch.distributed.is_initialized()


def test_buckets_keep_the_order_one_kind_each_and_their_bound() -> None:
    half = ranks._BUCKET_BYTES // 8  # float32 values that fill half a bucket
    floats, ints = torch.zeros(half), torch.zeros(3, dtype=torch.int64)
    huge = torch.zeros(2 * half + 1)
    found = ranks._buckets([floats, floats, floats, ints, ints, floats, huge, floats])
    assert [[tensor.numel() for tensor in bucket] for bucket in found] == [
        [half, half],
        [half],
        [3, 3],
        [half],
        [2 * half + 1],
        [half],
    ]

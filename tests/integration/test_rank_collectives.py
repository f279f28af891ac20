"""What ranks do together, as processes over gloo."""

from multiprocessing.connection import Connection

import torch

import rank_jobs
from eaglefeed.consumer.ranks import Ranks


def _report(pipe: Connection) -> None:
    """Each kind of call once; what came goes to the test."""
    with Ranks.of_job(timeout_s=20.0) as ranks:
        r = float(ranks.rank)
        sums = [
            torch.full((3, 2), r + 1),
            torch.arange(5) + ranks.rank,
            (torch.arange(6.0).reshape(2, 3) * (r + 1)).t(),
            torch.tensor(2**-24 if ranks.rank else 1.0),
            torch.full((2**23 + 3,), r + 1),
            torch.zeros(0),
        ]
        ranks.sum(sums)
        shared = [torch.full((2, 3), r + 5).t(), torch.tensor([ranks.rank == 0]), torch.tensor(7 + ranks.rank)]
        ranks.share(shared)
        told = [ranks.tell(b"to all" if ranks.is_first else b""), ranks.tell(b"")]
        parts = [b"x" * rank for rank in range(ranks.world_size)] if ranks.is_first else []
        handed = [ranks.hand_out(parts), ranks.hand_out([b""] * ranks.world_size)]
        collected = [ranks.collect(b"r" * ranks.rank), ranks.collect(b"")]
    assert not torch.distributed.is_initialized()
    sums[4] = sums[4].unique()
    pipe.send((ranks.rank, [each.tolist() for each in sums], [each.tolist() for each in shared]))
    pipe.send((told, handed, collected))


def test_sums_are_equal_on_all_ranks_and_right_for_every_kind_of_tensor() -> None:
    with rank_jobs.job(3, _report) as ranks:
        found = [rank.hear() for rank in ranks]
        messages = [rank.hear() for rank in ranks]
    for number, (rank, sums, shared) in enumerate(found):
        assert rank == number
        assert sums[0] == [[6.0] * 2] * 3
        assert sums[1] == [3, 6, 9, 12, 15]
        assert sums[2] == [[0.0, 18.0], [6.0, 24.0], [12.0, 30.0]]
        assert sums[3] == found[0][1][3]  # rounded, and the same way everywhere
        assert sums[4] == [6.0]
        assert sums[5] == []
        assert shared == [[[5.0, 5.0]] * 3, [True], 7]
    assert [told for told, _, _ in messages] == [[b"to all", b""]] * 3
    assert [handed for _, handed, _ in messages] == [[b"", b""], [b"x", b""], [b"xx", b""]]
    assert [collected for _, _, collected in messages] == [[[b"", b"r", b"rr"], [b""] * 3], [[], []], [[], []]]


def _sums(pipe: Connection) -> None:
    """Values that round differently in another order, summed again and again."""
    with Ranks.of_job(timeout_s=20.0) as ranks:
        draw = torch.Generator().manual_seed(ranks.rank)
        values = [torch.randn(size, generator=draw) * 10 ** (index % 7) for index, size in enumerate([3, 1000, 77, 5])]
        for _ in range(3):
            tensors = [value.clone() for value in values]
            ranks.sum(tensors)
            pipe.send([tensor.tolist() for tensor in tensors])


def test_equal_values_give_equal_sums_bit_for_bit_also_in_another_job() -> None:
    found = []
    for _ in range(2):
        with rank_jobs.job(3, _sums) as ranks:
            found += [rank.hear() for rank in ranks for _ in range(3)]
    assert all(each == found[0] for each in found)


def _within_anothers_group(pipe: Connection) -> None:
    torch.distributed.init_process_group("gloo")
    for word in (b"a", b"b"):  # one job after the other
        with Ranks.of_job(timeout_s=20.0) as ranks:
            pipe.send(ranks.tell(word if ranks.is_first else b""))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_a_group_that_is_there_already_is_used_and_left_as_it_was() -> None:
    with rank_jobs.job(2, _within_anothers_group) as ranks:
        assert [[rank.hear(), rank.hear()] for rank in ranks] == [[b"a", b"b"]] * 2
        for rank in ranks:
            rank.process.join(rank_jobs.PATIENCE_S)
            assert rank.process.exitcode == 0

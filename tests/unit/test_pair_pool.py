"""When a client gives pair groups up, and when it tries them again."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eaglefeed.clock import ManualClock
from eaglefeed.errors import PeerGone
from eaglefeed.storage.control import ControlClient
from eaglefeed.storage.pair_pool import PairPool


class JoiningPool(PairPool):
    """Every pair comes about; what becomes of its transfers is the test's."""

    def _granted(self, pair: Any) -> Any:
        pair.epoch += 1

    def _joined(self, grant: Any) -> Any:
        return SimpleNamespace(close=lambda: None)

    def transfer(self, *, breaks: bool) -> bool:
        """Use a pair; whether there was one."""
        with self.borrow() as pair:
            if pair is not None and breaks:
                raise PeerGone("broken in its transfer", subject=pair.name_epoch)
            if pair is not None:
                pair.is_proven = True
            return pair is not None


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def pool(clock: ManualClock) -> JoiningPool:
    client = ControlClient("http://127.0.0.1:9")
    return JoiningPool(client, backend="gloo", device=torch.device("cpu"), max_pairs=2, timeout_s=10, clock=clock)


def test_pairs_that_break_one_after_another_at_their_first_transfer_are_given_up_for_a_while(
    pool: JoiningPool, clock: ManualClock
) -> None:
    for _ in range(2):
        with pytest.raises(PeerGone):
            pool.transfer(breaks=True)
    assert not pool.transfer(breaks=False)
    clock.advance(61)
    assert pool.transfer(breaks=False)


def test_a_pair_that_breaks_after_good_transfers_is_opened_again_at_once(pool: JoiningPool) -> None:
    for _ in range(5):
        assert pool.transfer(breaks=False)
        with pytest.raises(PeerGone):
            pool.transfer(breaks=True)

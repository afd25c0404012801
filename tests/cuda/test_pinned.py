"""Page-locked memory that is lent and comes back by itself."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest

from frink_numba.cuda.pinned import PinnedPool
from tests.cuda.fake_gpu import FakeRuntime

MIB = 1 << 20


def test_a_block_comes_back_when_its_last_view_is_gone():
    """A view of a view keeps the block out; then the same memory is lent again, without a new allocation."""
    runtime = FakeRuntime()
    pool = PinnedPool(runtime)
    lent = pool.lend(4096)
    address = lent.__array_interface__["data"][0]
    view = lent[:64].view(np.float32).reshape(4, 4)[1:]
    del lent
    other = pool.lend(4096)
    assert other.__array_interface__["data"][0] != address
    view[:] = 3.0  # still ours
    assert len(runtime.pinned) == 2
    del view
    gc.collect()
    again = pool.lend(4096)
    assert again.__array_interface__["data"][0] == address
    assert len(runtime.pinned) == 2


def test_two_loans_never_share_memory():
    pool = PinnedPool(FakeRuntime())
    loans = [pool.lend(100_000) for _ in range(6)]
    for number, loan in enumerate(loans):
        loan[:] = number
    assert [set(loan.tolist()) for loan in loans] == [{number} for number in range(6)]
    assert all(loan.nbytes == 100_000 and loan.flags.writeable for loan in loans)


def test_a_block_that_is_far_too_large_is_not_lent():
    """A short answer must not hold the memory of a long prompt."""
    runtime = FakeRuntime()
    pool = PinnedPool(runtime)
    pool.lend(64 * MIB)
    pool.lend(1000)
    assert [block.nbytes for block in runtime.pinned] == [64 * MIB, MIB // 16]


def test_few_blocks_are_kept(monkeypatch: pytest.MonkeyPatch):
    """Ten answers held at once do not stay locked for ever."""
    monkeypatch.setattr("frink_numba.cuda.pinned._KEPT_BYTES", 4 * MIB)
    runtime = FakeRuntime()
    pool = PinnedPool(runtime)
    loans = [pool.lend(MIB) for _ in range(10)]
    del loans
    gc.collect()
    assert len([pool.lend(MIB) for _ in range(10)]) == 10
    assert len(runtime.pinned) == 16
    pool.clear()
    assert len(pool._free) == 0


def test_arrays_may_be_dropped_in_any_thread():
    """Loans that are given back while another thread borrows: every byte stays the borrower's own."""
    pool = PinnedPool(FakeRuntime())
    wrong: list[int] = []

    def borrow(number: int) -> None:
        for _ in range(300):
            loan = pool.lend(2000)
            loan[:] = number
            if not (loan == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=borrow, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong

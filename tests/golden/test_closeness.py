"""The measure of a device's logits can fail: each of its parts by itself."""

from __future__ import annotations

import numpy as np
import pytest

from tests.golden.closeness import assert_close

WANT = (3 * np.random.default_rng(0).normal(size=(20, 50))).astype(np.float32)


def test_near_logits_are_close():
    assert_close(WANT * np.float32(1 + 1e-4), WANT, 1e-2)


def test_one_position_beyond_the_bound_is_seen():
    got = WANT.copy()
    got[7] *= 1.02
    with pytest.raises(AssertionError, match=r"0\.0"):
        assert_close(got, WANT, 1e-2)


def test_what_is_no_number_is_seen():
    got = WANT.copy()
    got[3, 4] = np.nan
    with pytest.raises(AssertionError):
        assert_close(got, WANT, 1e-2)


def test_distributions_that_differ_are_seen_within_any_bound():
    noise = np.random.default_rng(1).normal(0, 0.3, WANT.shape).astype(np.float32)
    with pytest.raises(AssertionError):
        assert_close(WANT + noise, WANT, 1.0)

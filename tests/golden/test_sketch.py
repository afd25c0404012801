"""The sketch sees errors of every shape, near their true size."""

import numpy as np
import pytest

from tests.golden.draws import integers, normal, signs
from tests.golden.sketch import SAFETY, sketch, sketched_errors

VOCAB = 49152


@pytest.mark.parametrize("shape", ["one logit", "eight logits", "spread", "constant", "like the logits"])
def test_an_error_of_any_shape_shows_with_its_size(shape):
    rows = normal("rows", (50, VOCAB), 3.0)
    norms = np.linalg.norm(rows.astype(np.float64), axis=1)
    error = {
        "one logit": lambda: np.eye(50, VOCAB, k=7),
        "eight logits": lambda: np.repeat(np.eye(50, VOCAB // 8, k=7), 8, axis=1),
        "spread": lambda: normal("error", (50, VOCAB)),
        "constant": lambda: np.ones((50, VOCAB)),
        "like the logits": lambda: rows,
    }[shape]()
    error = error / np.linalg.norm(error, axis=1, keepdims=True) * norms[:, None] * 1e-4
    seen = sketched_errors(rows + error, sketch(rows), norms)
    assert (seen > 1e-4 / SAFETY).all()
    assert (seen < 1e-4 * SAFETY).all()


def test_nan_never_passes():
    rows = normal("rows", (3, VOCAB))
    broken = rows.copy()
    broken[1, 5] = np.nan
    seen = sketched_errors(broken, sketch(rows), np.ones(3))
    assert not seen.max() < 1e9


def test_draws_are_the_same_for_ever():
    """Goldens rest on them: a change here means that every golden is to be made anew."""
    assert integers("a", (4,), 1000).tolist() == [991, 647, 330, 24]
    assert signs("b", (8,)).tolist() == [-1, 1, 1, -1, 1, -1, -1, 1]
    values = normal("c", (100000,), 2.0)
    assert values.dtype == np.float32
    assert values.mean() == pytest.approx(0, abs=0.03)
    assert values.std() == pytest.approx(2, rel=0.01)

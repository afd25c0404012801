"""Every architecture's tiny model through a GPU, from tokens to logits, against transformers' logits."""

from __future__ import annotations

import numpy as np
import pytest

from frink_numba.cuda.device import open_device
from frink_numba.host.decoder import Decoder
from frink_numba.host.load import load
from tests.golden.tiny import VARIANTS, golden_logits, tokens
from tests.golden.tiny_gguf import content, write

pytestmark = pytest.mark.gpu

PLAIN = [name for name, variant in VARIANTS.items() if not variant.adapted]


def close(got: np.ndarray, want: np.ndarray) -> None:
    """Every position near; equal choices where the two first are apart (design: numerics)."""
    bound = 1e-4 if open_device(0).tier == "simt" else 1e-2
    assert np.isfinite(got).all()
    errors = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)
    assert errors.max() < bound, errors.max()
    first_two = np.partition(want, -2, axis=1)[:, -2:]
    clear = first_two[:, 1] - first_two[:, 0] > 2 * np.abs(got - want).max(axis=1)
    np.testing.assert_array_equal(got.argmax(axis=1)[clear], want.argmax(axis=1)[clear])


@pytest.mark.parametrize("name", PLAIN)
def test_logits_are_transformers(name: str, tmp_path):
    """In one go, in chunks, and token by token; layers that the device declines run on the host in between."""
    variant, ids = VARIANTS[name], tokens(VARIANTS[name])
    want = golden_logits(variant)
    path = write(content(variant), tmp_path / "m.gguf")
    with load(path, context_length=variant.context) as model, Decoder(model, "cuda,host") as decoder:
        whole = decoder.prefill(ids, decoder.new_cache(), logits="all").logits
        cache = decoder.new_cache()
        parts = [decoder.prefill(ids[:70], cache, logits="all", chunk_size=13).logits]
        parts += [decoder.decode(int(token), cache).logits[None] for token in ids[70:]]
    close(whole, want)
    close(np.concatenate(parts), want)

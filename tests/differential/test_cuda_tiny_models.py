"""Every architecture's tiny model through a GPU, from tokens to logits, against transformers' logits."""

from __future__ import annotations

import numpy as np
import pytest

from frink_numba.cuda.device import open_device
from frink_numba.host.decoder import Decoder
from frink_numba.host.load import load
from tests.golden.closeness import assert_close
from tests.golden.tiny import VARIANTS, golden_logits, tokens
from tests.golden.tiny_gguf import content, write

pytestmark = pytest.mark.gpu

PLAIN = [name for name, variant in VARIANTS.items() if not variant.adapted]


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
    bound = 1e-4 if open_device(0).tier == "simt" else 1e-2
    assert_close(whole, want, bound)
    assert_close(np.concatenate(parts), want, bound)

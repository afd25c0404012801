"""FRINK_INVARIANT on a GPU: logits, hidden states and K/V rows are the same bits however a text is cut.

Each tier, over models of SmolLM2's widths: chunks of one token and of hundreds, steps over rows that a mirror has and
over rows that come from the host's cache, several prompts at once, tokens that the device chose by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from frink_numba import registry
from frink_numba.cuda.backend import CudaBackend
from frink_numba.cuda.device import CudaDevice, make_body, make_runtime, visible_devices
from frink_numba.cuda.tier import choose_tier
from frink_numba.errors import BackendError, BackendUnavailable
from frink_numba.host.decoder import Decoder
from frink_numba.host.load import load
from frink_numba.host.model import Model
from tests.differential.gpu import TIERS, poison
from tests.golden.tiny import VARIANTS, Variant
from tests.golden.tiny_gguf import content, write
from tests.golden.tiny_text import PADDED, text_content
from tests.golden.tiny_text import TOKENS as TEXT_TOKENS
from tests.invariance import answers, differences, random_cuts

pytestmark = pytest.mark.gpu

VOCABULARY, TOKENS = PADDED, 700
SIZES = (1, 2, 7, 16, 63, 64, 65, 128, 257, 500)
_WIDE = {"vocab": VOCABULARY, "layers": 3, "tokens": TOKENS, "context": 2048, "eps": 1e-5}


def _mixed(variant: Variant, kinds: tuple[str, ...]) -> Callable[..., object]:
    """The variant's content, each matrix of another of these kinds in turn."""
    from gguf import GGMLQuantizationType, quants

    file = content(variant)
    file.metadata[f"{variant.architecture}.context_length"] = 2048
    file.metadata |= {key: value for key, value in text_content().metadata.items() if key.startswith("tokenizer.")}
    matrices = [name for name, tensor in file.tensors.items() if tensor.ndim == 2]
    for number, name in enumerate(matrices):
        # Gate and up share a product where they are of one kind, and q, k and v do.
        kind = GGMLQuantizationType[kinds[number // 2 % len(kinds)]]
        file.tensors[name] = quants.quantize(file.tensors[name].astype(np.float32), kind), kind
    return file  # type: ignore[return-value]


MODELS = {
    # SmolLM2: 9 heads over 3, one kind.
    "llama": (
        replace(VARIANTS["llama_grouped"], hidden=576, ffn=1536, heads=9, kv_heads=3, head_dim=64, **_WIDE),
        ("Q4_1",),
    ),
    # Windows, soft caps and post-norms; gate and up of two kinds.
    "gemma2": (
        replace(
            VARIANTS["gemma2_window"], hidden=512, ffn=1024, heads=4, kv_heads=2, head_dim=128, window=100, **_WIDE
        ),
        ("Q8_0", "Q5_1", "F16"),
    ),
    "mistral": (
        replace(
            VARIANTS["mistral_window"], hidden=512, ffn=1024, heads=8, kv_heads=2, head_dim=64, window=100, **_WIDE
        ),
        ("Q5_0", "Q8_0"),
    ),
    # QK norm of each head, one query head a K/V head.
    "qwen3": (
        replace(VARIANTS["qwen3_grouped"], hidden=512, ffn=1536, heads=8, kv_heads=8, head_dim=64, **_WIDE),
        ("Q4_0", "Q8_0"),
    ),
}
CASES = [(name, tier) for tier in TIERS for name in MODELS if tier != "simt" or name in ("llama", "mistral")]


@cache
def device_of(tier: str, invariant: bool) -> CudaDevice:
    info = visible_devices()[0]
    try:
        choose_tier(tier, info.compute_capability)
    except BackendUnavailable as error:
        pytest.skip(str(error))
    runtime = make_runtime(tier, info.number)
    return CudaDevice(info, runtime, make_body(tier, info, runtime, invariant=invariant))


def ids_of(n: int = TOKENS, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, n)


class Rig:
    """A model and its decoders, each on a device of its own mode."""

    def __init__(self, name: str, tier: str, folder, patch: pytest.MonkeyPatch) -> None:
        self.tier = tier
        patch.setattr(registry, "_registered", dict(registry._registered))
        variant, kinds = MODELS[name]
        path = write(_mixed(variant, kinds), folder / "m.gguf")  # type: ignore[arg-type]
        self.models: list[Model] = []
        for invariant in (False, True):
            device = device_of(tier, invariant)
            patch.setenv("FRINK_INVARIANT", str(int(invariant)))
            label = f"gpu{int(invariant)}"
            registry.register_backend(label, lambda layers, d=device, n=label: CudaBackend(layers, d, n))
            self.models.append(load(path, context_length=2048))
        self.plain, self.decoder = self._decoder(0, patch), self._decoder(1, patch)

    def _decoder(self, mode: int, patch: pytest.MonkeyPatch) -> Decoder:
        patch.setenv("FRINK_INVARIANT", str(mode))
        decoder = Decoder(self.models[mode], f"gpu{mode}")
        assert decoder.plan(batch=8).backend_of(0) == f"gpu{mode}"
        return decoder

    @property
    def device(self) -> CudaDevice:
        return device_of(self.tier, True)

    def close(self) -> None:
        for model in self.models:
            model.close()


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with pytest.MonkeyPatch.context() as patch:
        made = Rig(*request.param, tmp_path_factory.mktemp("model"), patch)
        yield made
        made.close()


@pytest.fixture(scope="module")
def whole(rig: Rig) -> dict[str, np.ndarray]:
    return answers(rig.decoder, ids_of(), [TOKENS], layers=(1,))


@pytest.mark.parametrize("seed", range(4))
def test_random_chunks(seed: int, rig: Rig, whole: dict[str, np.ndarray]):
    cuts = random_cuts(np.random.default_rng(seed), TOKENS, SIZES[seed % 2 * 3 :])
    poison(rig.device)
    assert not differences(whole, answers(rig.decoder, ids_of(), cuts, layers=(1,))), cuts


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 63, 64, 65, 500])
def test_chunks_of_one_size(size: int, rig: Rig, whole: dict[str, np.ndarray]):
    """Few tokens, one by one; of many, each chunk's last logits alone."""
    n = min(TOKENS, 40 * size)
    cuts = [size] * (n // size)
    found = answers(rig.decoder, ids_of(n // size * size), cuts, logits="last")
    at = found["positions"]
    part = {name: rows[: n // size * size] for name, rows in whole.items()}
    part["logits"] = whole["logits"][at]
    assert not differences({k: v for k, v in found.items() if k != "positions"}, part)


def test_rows_that_come_from_the_host(rig: Rig, whole: dict[str, np.ndarray]):
    """A cache that was filled by hand, or cut off and filled again, gives the bits of one that the device filled."""
    half = 333
    filled, other = rig.decoder.new_cache(), rig.decoder.new_cache()
    rig.decoder.prefill(ids_of()[:half], filled)
    other.push([tuple(part.copy() for part in rows.prefix()) for rows in filled])
    filled.truncate(100)
    rig.decoder.prefill(ids_of()[100:half], filled)
    for rows_held in (other, filled):
        out = rig.decoder.prefill(ids_of()[half:], rows_held, logits="all")
        np.testing.assert_array_equal(out.logits.view(np.uint32), whole["logits"][half:].view(np.uint32))
        for number, rows in enumerate(rows_held):
            for name, part in zip("KV", rows.prefix(), strict=True):
                np.testing.assert_array_equal(part, whole[f"{name} {number}"])


@pytest.mark.parametrize("seed", range(3))
def test_neighbours(seed: int, rig: Rig, whole: dict[str, np.ndarray]):
    """One of several prompts, of any lengths, in any place."""
    rng = np.random.default_rng(seed)
    prompts = [ids_of(int(n), seed=9) for n in rng.choice(SIZES[:7], 4)]
    place = int(rng.integers(5))
    n = (300, 64, TOKENS)[seed]
    prompts.insert(place, ids_of()[:n])
    caches = [rig.decoder.new_cache() for _ in prompts] if seed else None
    outputs = rig.decoder.prefill_batch(prompts, caches, logits="all", chunk_size=(2048, 2048, 401)[seed])
    found = outputs[place].logits
    np.testing.assert_array_equal(found.view(np.uint32), whole["logits"][:n].view(np.uint32))
    if caches is not None:
        for number, rows in enumerate(caches[place]):
            for name, part in zip("KV", rows.prefix(), strict=True):
                np.testing.assert_array_equal(part, whole[f"{name} {number}"][:n])


def test_generated_tokens(rig: Rig):
    """Greedy tokens, however many the device chooses by itself, are those of single steps, and so are their rows."""
    prompt = ids_of(50)
    cache = rig.decoder.new_cache()
    made = [
        piece.token
        for piece in rig.decoder.generate([int(i) for i in prompt], max_new_tokens=24, temperature=0, cache=cache)
    ]
    alone, chosen = rig.decoder.new_cache(), []
    logits = rig.decoder.prefill(prompt, alone).logits
    for _ in made:
        chosen.append(int(np.argmax(logits[:TEXT_TOKENS])))
        logits = rig.decoder.decode(chosen[-1], alone).logits
    assert made == chosen
    n = min(cache.positions, alone.positions)
    assert n > 55
    for one, other in zip(cache, alone, strict=True):
        for a, b in zip(one.prefix(), other.prefix(), strict=True):
            np.testing.assert_array_equal(a[:n], b[:n])


def test_a_cache_of_float16(rig: Rig):
    """Rows are f16 on the tensor cores anyway; the simt tier, which has them in float32, refuses."""
    ids = ids_of(200)
    if rig.tier == "simt":
        with pytest.raises(BackendError, match="need a cache of float32"):
            rig.decoder.prefill(ids, rig.decoder.new_cache(dtype=np.float16))
        return
    one, other = (answers(rig.decoder, ids, cuts, dtype=np.float16) for cuts in ([200], [64, 1, 1, 134]))
    assert not differences(one, other)


def test_it_stays_close_to_the_usual_kernels(rig: Rig, whole: dict[str, np.ndarray]):
    usual = answers(rig.plain, ids_of(), [TOKENS])["logits"]
    error = np.linalg.norm(whole["logits"] - usual, axis=1) / np.linalg.norm(usual, axis=1)
    assert error.max() < (1e-4 if rig.tier == "simt" else 2e-2)


def test_without_the_setting_bits_do_depend_on_chunks(rig: Rig):
    """What the tests above can see: of the usual kernels at least one cut gives other bits."""
    ids = ids_of(130)
    one, *others = (answers(rig.plain, ids, cuts) for cuts in ([130], [4] * 31 + [6], [65, 65]))
    found = [differences(one, other) for other in others]
    print(rig.tier, found)
    assert any(found)

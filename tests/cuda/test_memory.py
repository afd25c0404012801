"""Budgets and sizes, computed without a device."""

from __future__ import annotations

import numpy as np
import pytest

from frink_numba.cuda.memory import MemoryLimit
from frink_numba.cuda.parts import inverse_frequencies, rope_key, vectors
from frink_numba.cuda.simt.weights import layer_bytes
from frink_numba.cuda.traffic import Traffic
from frink_numba.errors import SettingError
from frink_numba.plan import in_units
from tests.cuda.fake_gpu import fake_device
from tests.cuda.test_run import OPTIONS
from tests.random_layers import random_layer


def test_nine_tenths_of_what_was_free_when_first_asked():
    """The device is asked once, however much is in use later."""
    answers = [1000]
    limit = MemoryLimit(lambda: answers.pop())
    assert [limit.bytes(), limit.bytes()] == [900, 900]


def test_the_setting_counts_as_it_stands(monkeypatch: pytest.MonkeyPatch):
    """FRINK_CUDA_MEMORY needs no question to the device; nonsense is an error."""
    limit = MemoryLimit(lambda: pytest.fail("asked"))
    monkeypatch.setenv("FRINK_CUDA_MEMORY", "2G")
    assert limit.bytes() == 2 << 30
    monkeypatch.setenv("FRINK_CUDA_MEMORY", "much")
    with pytest.raises(SettingError):
        limit.bytes()


def test_it_only_sinks_after_memory_ran_out(monkeypatch: pytest.MonkeyPatch):
    limit = MemoryLimit(lambda: 1000)
    limit.lower(500)
    limit.lower(700)
    assert limit.bytes() == 500
    monkeypatch.setenv("FRINK_CUDA_MEMORY", "1000000")
    assert limit.bytes() == 500


@pytest.mark.parametrize("options", OPTIONS)
def test_a_layers_size_is_what_its_upload_takes(options):
    """The budget's arithmetic and the allocation are the same number, and every byte of it is uploaded but padding."""
    device = fake_device()
    layer = random_layer(np.random.default_rng(0), options)
    traffic = Traffic()
    with device.working():
        stream = device.workspace.compute
        uploaded = device.body.upload(layer, stream, traffic)
        device.runtime.drain()
    assert uploaded.nbytes == layer_bytes(layer) == device.runtime.allocated()
    assert traffic.weights_up == device.runtime.up
    parts = len(uploaded.matrices) + len(uploaded.vectors)
    assert 0 <= uploaded.nbytes - traffic.weights_up < 256 * parts
    for name, host in vectors(layer).items():
        np.testing.assert_array_equal(uploaded.vectors[name], host)


def test_inverse_frequencies_divide_by_the_factors_in_float64():
    """R17, and field report: factors ignored; an angle in float32 is off at far positions."""
    layer = random_layer(np.random.default_rng(0), factors=True, partial=True, theta=500000.0)
    rope = layer.attention.rope
    assert rope is not None
    got = inverse_frequencies(layer)
    assert got is not None
    assert got.dtype == np.float64
    for pair in range(rope.rot_dim // 2):
        assert got[pair] == pytest.approx(
            500000.0 ** (-2 * pair / rope.rot_dim) / float(rope.freq_factors[pair]), rel=1e-15
        )
    assert inverse_frequencies(random_layer(np.random.default_rng(0), layout=None)) is None


def test_equal_tables_have_equal_keys():
    rng = np.random.default_rng(0)
    one, same = random_layer(rng), random_layer(rng)
    assert rope_key(one) == rope_key(same)
    assert rope_key(one) != rope_key(random_layer(rng, magnitude=1.1))
    assert rope_key(one) != rope_key(random_layer(rng, theta=9999.0))
    assert rope_key(one) != rope_key(random_layer(rng, factors=True))
    assert rope_key(random_layer(rng, layout=None)) is None


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 29, "1.5 GiB"), (5 << 50, "5120.0 TiB")]
)
def test_bytes_for_people(nbytes: int, text: str):
    assert in_units(nbytes) == text

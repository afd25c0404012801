"""The table of architectures, and that whatever it does not know is refused by name (R16's spirit, fault 19)."""

import pytest

from frink_numba.errors import UnsupportedModelError
from frink_numba.host.architectures import find_architecture
from frink_numba.layer import RopeLayout


def test_rope_layouts_are_those_of_the_files():
    """Fault 15: llama's converter reorders Q and K for adjacent pairs, qwen2's does not."""
    assert find_architecture("llama").rope_layout is RopeLayout.NORM
    assert find_architecture("qwen2").rope_layout is RopeLayout.NEOX


@pytest.mark.parametrize("name", ["mamba", "qwen3", "gemma2", "LLAMA", "", "x" * 5000])
def test_an_unknown_architecture_is_refused_with_the_list_of_those_that_run(name):
    with pytest.raises(UnsupportedModelError, match=r"llama \(.*SmolLM2.*qwen2 \(") as caught:
        find_architecture(name)
    assert repr(name[:80]) in str(caught.value)
    assert len(str(caught.value)) < 500

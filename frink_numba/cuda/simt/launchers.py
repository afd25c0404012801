"""The kernels' launchers that the stack is built from, as one object: loading it imports numba."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from frink_numba.quant import QuantMatrix


@dataclass(frozen=True, slots=True)
class Launchers:
    """Each as its file in `frink_numba.kernels` describes it: device arrays first, the stream last."""

    rms_norm: Callable[..., None]
    add_bias: Callable[..., None]
    rope_table: Callable[..., None]
    rope: Callable[..., None]
    causal_attention: Callable[..., None]
    swiglu: Callable[..., None]
    residual_add: Callable[..., None]
    quantized_matmul: Callable[..., None]
    pack: Callable[[QuantMatrix], np.ndarray]  # a matrix's bytes as `matrix` takes them, made on the host
    matrix: Callable[..., Any]  # (kind, device bytes, rows, cols): what `quantized_matmul` takes


def load_launchers(*, invariant: bool = False) -> Launchers:
    """The launchers of the `simt` tier. ImportError when numba-cuda cannot be imported.

    invariant: few rows go through the products for many, which sum in another order than those for few.
    """
    from frink_numba.kernels.attention import causal_attention
    from frink_numba.kernels.bias import add_bias
    from frink_numba.kernels.device_matrix import DeviceMatrix, pack
    from frink_numba.kernels.quantized_matmul import quantized_matmul
    from frink_numba.kernels.residual import residual_add
    from frink_numba.kernels.rms_norm import rms_norm
    from frink_numba.kernels.rope import rope, rope_table
    from frink_numba.kernels.swiglu import swiglu

    return Launchers(
        rms_norm=rms_norm,
        add_bias=add_bias,
        rope_table=rope_table,
        rope=rope,
        causal_attention=causal_attention,
        swiglu=swiglu,
        residual_add=residual_add,
        quantized_matmul=functools.partial(quantized_matmul, thin=False) if invariant else quantized_matmul,
        pack=pack,
        matrix=DeviceMatrix,
    )

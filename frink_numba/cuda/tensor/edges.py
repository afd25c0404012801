"""The embedding and the output matrix on the device, for runs that begin with tokens and end with logits."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from frink_numba.backend import Edges
from frink_numba.cuda.arena import Layout
from frink_numba.cuda.runtime import Runtime
from frink_numba.cuda.tensor.weights import Pack, group_sizes
from frink_numba.cuda.traffic import Traffic
from frink_numba.kernels.gemm import DeviceWeights, why_not
from frink_numba.kernels.gemm_pack import PackedMatrix, pack

_LOGITS_BYTES = 32 << 20  # of the rows of logits that are on the device at a time, in the scratch
_MOST_ROWS = 128

_serials = itertools.count()


@dataclass(frozen=True, slots=True, eq=False)
class TensorEdges:
    """Edges on the device; `layer` is what they were made from, as the bank of weights calls it."""

    layer: Edges
    nbytes: int
    embedding: DeviceWeights
    output: DeviceWeights
    norm: int
    serial: int
    block: Any = field(repr=False)


def decline_edges(edges: Edges) -> str | None:
    """Why the device cannot do them; None when it can."""
    for matrix in (edges.embedding, edges.output):
        reason = why_not(matrix.kind, matrix.cols)
        if reason is not None:
            return reason
    if edges.output.rows % 4:
        return f"a vocabulary of {edges.output.rows}, which is no multiple of 4"
    return None


def logits_rows(edges: Edges) -> int:
    """Rows of logits that are on the device at a time."""
    return max(1, min(_MOST_ROWS, _LOGITS_BYTES // (4 * edges.output.rows)))


def edges_bytes(edges: Edges) -> int:
    """Bytes that they take on the device."""
    return _layout(edges).nbytes


def pack_edges(edges: Edges) -> list[PackedMatrix]:
    """The embedding repacked, and the output matrix where it is another."""
    matrices = [edges.embedding] if edges.output is edges.embedding else [edges.embedding, edges.output]
    return [pack([matrix]) for matrix in matrices]


def upload_edges(
    runtime: Runtime, edges: Edges, stream: Any, traffic: Traffic, packed: Sequence[PackedMatrix] | None = None
) -> TensorEdges:
    """Allocate one block and fill it in the order of `stream`. Raises what the runtime raises.

    packed: what `pack_edges` made of it, where that is there already.
    """
    nbytes = edges_bytes(edges)
    block = runtime.device_bytes(nbytes)
    base, layout = runtime.address(block), Layout()

    def place(source: np.ndarray) -> int:
        address = base + layout.add(source.nbytes)
        runtime.send(address, np.ascontiguousarray(source), stream)
        traffic.weights_up += source.nbytes
        return address

    weights = [DeviceWeights.of(made, place(made.data), place(made.row_scale)) for made in packed or pack_edges(edges)]
    embedding, output = weights[0], weights[-1]
    norm = place(edges.output_norm)
    return TensorEdges(edges, nbytes, embedding, output, norm, next(_serials), block)


def _layout(edges: Edges) -> Layout:
    layout = Layout()
    matrices = [edges.embedding] if edges.output is edges.embedding else [edges.embedding, edges.output]
    for matrix in matrices:
        for size in group_sizes((Pack((matrix,)),)):
            layout.add(size)
    layout.add(edges.output_norm.nbytes)
    return layout

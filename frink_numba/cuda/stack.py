"""The resident stack for other engines: arrays and a layer description in, a hidden batch and K/V rows out.

    with load_layers(layers) as resident:                    # weights go up once
        hidden, kv_rows = launch_prefill_dense_stack(hidden, resident, prefix=prefix)

Nothing here knows a model, a cache or a dispatcher. The caller owns its K/V cache, hands the rows before the batch over
as `prefix`, and appends the rows that come back.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import numpy as np

from frink_numba.cuda.body import KvSource, Rows
from frink_numba.cuda.classify import decline_reason
from frink_numba.cuda.device import CudaDevice, open_device
from frink_numba.cuda.residency import check_room, hold_layers, release_holder
from frink_numba.cuda.shapes import check_hidden, check_layer, check_prefix
from frink_numba.cuda.traffic import Traffic
from frink_numba.cuda.weights import DeviceLayer
from frink_numba.errors import BackendError, DeviceError, ShapeError
from frink_numba.layer import Layer


class ResidentLayers:
    """The weights of consecutive layers on a device, until `close`; a context manager. Made by `load_layers`."""

    def __init__(self, device: CudaDevice, layers: Sequence[Layer]) -> None:
        self.layers = tuple(layers)
        self.device = device
        self.traffic = Traffic()  # all that went over the bus for these layers
        self._holder = object()
        # Stand in for the caches that the caller keeps: the device's K/V memory is used again by the next call.
        self._caches = [_Unknown() for _ in layers]

    def __enter__(self) -> ResidentLayers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the device memory back; may be called twice."""
        release_holder(self.device, self._holder)

    def sources(self, prefixes: Sequence[Rows]) -> list[KvSource]:
        """The K/V rows before the batch; no `prefixes` where there are none."""
        if prefixes:
            return [KvSource(rows, cache) for rows, cache in zip(prefixes, self._caches, strict=True)]
        found = []
        for layer, cache in zip(self.layers, self._caches, strict=True):
            empty = np.empty((0, layer.attention.n_kv_heads, layer.attention.head_dim), np.float32)
            found.append(KvSource((empty, empty), cache))
        return found

    def device_layers(self) -> list[DeviceLayer]:
        """The layers on the device, uploaded if they are not there; under `device.working()`."""
        return hold_layers(self.device, self.layers, self._holder, self.traffic)


class _Unknown:
    """A cache that tells nothing of its rows: they go up with every call."""


def load_layers(layers: Sequence[Layer], *, device: int | CudaDevice = 0) -> ResidentLayers:
    """Check `layers` (at least one) and put their weights on a device, given by its number among the visible ones.

    BackendUnavailable when the device cannot be used; BackendError when a layer asks for what no kernel computes;
    ShapeError when parts of a layer do not fit together; DeviceError when the weights do not fit or a copy fails.
    """
    if not layers:
        raise ShapeError("a stack needs at least one layer")
    opened = open_device(device) if isinstance(device, int) else device
    for number, layer in enumerate(layers):
        reason = decline_reason(opened.body.judged(layer))
        if reason is not None:
            raise BackendError(f"layer {number} cannot run on the device: {reason}")
        check_layer(layer)
        reason = opened.body.why_not(layer)
        if reason is not None:
            raise BackendError(f"layer {number} cannot run on the device: {reason}")
    resident = ResidentLayers(opened, layers)
    try:
        with resident.device.working():
            resident.device_layers()
    except Exception as error:  # numba, cuda.core and cuda.bindings each have classes of their own
        text = resident.device.problem or resident.device.failed(error)
        resident.close()
        raise DeviceError(text) from error
    return resident


def launch_prefill_dense_stack(
    hidden: np.ndarray,
    layers: Sequence[Layer] | ResidentLayers,
    batch: int | None = None,
    *,
    prefix: Sequence[Rows] | None = None,
    device: int | CudaDevice = 0,
) -> tuple[np.ndarray, list[Rows]]:
    """Take a hidden batch through dense layers on a device: up once, down once, K/V rows back for each layer.

    hidden    float32 [batch, hidden_dim], C-contiguous; not written to. `batch`, when given, must agree; any from 1.
    layers    descriptions, whose weights then go up and away again, or what `load_layers` made (`device` is its own).
    prefix    for each layer the K and V rows of the positions before the batch, [start_pos, n_kv_heads, head_dim],
              float32 or float16, K after its rotation; None when the batch starts at position 0. The number of rows is
              the batch's start position.

    Answers `(hidden, kv_rows)`: float32 [batch, hidden_dim] after the last layer, and for each layer its K and V rows
    float32 [batch, n_kv_heads, head_dim], K after the rotation. The arrays are the caller's, in page-locked memory.

    Raises as `load_layers`, ShapeError for arrays that do not fit the layers, and DeviceError when the device fails:
    out of memory, a launch, a copy, a lost device, a process forked after CUDA was used.
    """
    if not isinstance(layers, ResidentLayers):
        with load_layers(layers, device=device) as resident:
            return launch_prefill_dense_stack(hidden, resident, batch, prefix=prefix)
    rows = hidden.shape[0] if batch is None and hidden.ndim else int(batch or 0)
    check_hidden(hidden, rows, layers.layers)
    prefixes = list(prefix) if prefix is not None else []
    start_pos = prefixes[0][0].shape[0] if prefixes else 0
    if prefixes and len(prefixes) != len(layers.layers):
        raise ShapeError(f"prefix rows of {len(prefixes)} layers, but {len(layers.layers)} layers")
    for layer, (keys, values) in zip(layers.layers, prefixes, strict=False):
        check_prefix(layer, keys, values, start_pos)
    return _launch(layers, hidden, prefixes, start_pos)


def _launch(
    resident: ResidentLayers, hidden: np.ndarray, prefixes: list[Rows], start_pos: int
) -> tuple[np.ndarray, list[Rows]]:
    device, traffic = resident.device, Traffic()
    try:
        with device.working():
            layers = resident.device_layers()
            sources, total = resident.sources(prefixes), start_pos + hidden.shape[0]
            need = device.body.scratch(resident.layers).nbytes(hidden.shape[0], start_pos)
            mirrors = sum(
                device.body.mirror_bytes(layer, source.cache, total) - device.body.mirror_held(source.cache)
                for layer, source in zip(resident.layers, sources, strict=True)
            )
            check_room(device, mirrors, need)
            block = device.workspace.arena.reserve(need, spare=0)
            done = device.body.run(device.workspace, layers, hidden, sources, start_pos, block, traffic)
    except Exception as error:  # numba, cuda.core and cuda.bindings each have classes of their own
        raise DeviceError(device.problem or device.failed(error)) from error
    resident.traffic.add(traffic)
    assert done.hidden is not None  # it was not told otherwise
    return done.hidden, list(done.rows)

"""Who holds which layers on a device, within its memory budget."""

from __future__ import annotations

from collections.abc import Sequence

from frink_numba.cuda.device import CudaDevice
from frink_numba.cuda.traffic import Traffic
from frink_numba.cuda.weights import DeviceLayer
from frink_numba.errors import DeviceError
from frink_numba.layer import Layer
from frink_numba.plan import in_units


def hold_layers(
    device: CudaDevice, layers: Sequence[Layer], holder: object, traffic: Traffic, scratch: int = 0
) -> list[DeviceLayer]:
    """`layers` on the device in the name of `holder`; those that are missing go up first. Under `device.working()`.

    DeviceError, before anything is allocated, when they would pass the budget together with `scratch` bytes.
    """
    missing = {id(layer): layer for layer in layers if device.bank.find(layer, holder) is None}
    check_room(device, sum(device.body.layer_bytes(layer) for layer in missing.values()), scratch)
    with device.body.preparing(list(missing.values())):
        for layer in missing.values():
            device.bank.add(device.body.upload(layer, device.workspace.compute, traffic), holder)
    return [device.bank.get(layer) for layer in layers]


def check_room(device: CudaDevice, weights: int, scratch: int) -> None:
    """DeviceError when `weights` more bytes of weights and `scratch` bytes of scratch pass the device's budget."""
    limit = device.memory.bytes()
    need = device.bank.nbytes + device.body.mirrored_bytes + weights + max(scratch, device.arena_bytes)
    if need > limit:
        unused = device.body.mirrored_bytes
        device.body.forget_unused()
        need -= unused - device.body.mirrored_bytes
    if need > limit:
        raise DeviceError(
            f"{in_units(need)} of weights and scratch do not fit into the device memory budget of {in_units(limit)}; "
            "raise FRINK_CUDA_MEMORY or run fewer layers or rows"
        )


def release_holder(device: CudaDevice, holder: object) -> None:
    """Free what only `holder` holds. Does nothing on a lost device or in a forked process: no call would succeed."""
    if device.problem is not None:
        return
    with device.working():
        layers = device.bank.held_by(holder)
        for layer in layers:
            device.bank.drop(layer, holder)
        if layers:
            device.body.dropped()
            device.runtime.release()
        device.trim()

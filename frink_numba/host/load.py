"""Open a GGUF model by path or by fetched name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from frink_numba.errors import GgufError, SettingError, UnsupportedModelError
from frink_numba.host.adapters import Adapter, attach
from frink_numba.host.architectures import find_architecture
from frink_numba.host.fetch import resolve
from frink_numba.host.gguf import GgufFile
from frink_numba.host.hyperparameters import read_hyperparameters
from frink_numba.host.integers import checked_integer
from frink_numba.host.layers import build
from frink_numba.host.model import Model


def load(
    path_or_name: str | os.PathLike[str], *, context_length: int | None = None, adapters: Sequence[Adapter] = ()
) -> Model:
    """Open the model at a path, or under a fetched name ("smollm2-135m"); close it, or use it as a context manager.

    Weights stay in the mapped file until they are used. `context_length` lowers the model's own, never raises it; for
    a model with LongRoPE it also chooses the rotation. `adapters`: LoRA adapters in GGUF form, each a path, or a path
    and a scale; their updates are computed beside the projections, and add up.
    ModelNotFoundError: no such file or name. GgufError: a damaged or contradictory file. UnsupportedModelError: an
    architecture, hyper-parameter, tensor or adapter that is not served. SettingError: a bad `context_length` or scale.
    """
    gguf = GgufFile.open(resolve(path_or_name))
    try:
        where = str(gguf.paths[0])
        architecture = find_architecture(_architecture_name(gguf, where))
        hyper = read_hyperparameters(gguf.metadata, architecture, tensors=gguf.tensors, where=where)
        length = hyper.context_length
        if context_length is not None:
            length = checked_integer("context_length", context_length, 1, hyper.context_length)
        tensors = build(gguf, architecture, hyper, length)
        if adapters:
            tensors = replace(tensors, layers=attach(tensors.layers, architecture, _listed(adapters)))
        return Model(gguf, architecture, hyper, tensors, length)
    except BaseException:
        gguf.close()
        raise


def _listed(adapters: Sequence[Adapter]) -> Sequence[Adapter]:
    if isinstance(adapters, str | os.PathLike):
        raise SettingError(f"adapters={os.fspath(adapters)!r} is one path; write a list of adapters")
    return adapters


def _architecture_name(gguf: GgufFile, where: str) -> str:
    kind = gguf.metadata.get("general.type", "model")
    if kind != "model":
        raise UnsupportedModelError(f"{where}: general.type is {str(kind)[:80]!r}, not a model that runs by itself")
    name = gguf.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise GgufError(f"{where}: general.architecture is missing or not a string, so nothing says what this model is")
    return name

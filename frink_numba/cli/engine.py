"""Opens what most commands need: the model, and a decoder over the chosen backends."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from frink_numba.host.decoder import Decoder
    from frink_numba.host.model import Model


@contextmanager
def open_engine(arguments: argparse.Namespace) -> Iterator[tuple[Model, Decoder]]:
    """The model and its decoder, closed at the end; needs the arguments of `arguments.engine`."""
    from frink_numba.host.decoder import Decoder
    from frink_numba.host.load import load

    with load(arguments.model, context_length=arguments.context, adapters=arguments.adapters) as model:
        decoder = Decoder(model, backends=arguments.backend)
        try:
            yield model, decoder
        finally:
            decoder.close()


def label(model: Model) -> str:
    """The model's file name without its ending and part number, to name it in figures."""
    return re.sub(r"-\d{5}-of-\d{5}$", "", model.gguf.paths[0].name.removesuffix(".gguf"))

"""An open model: its facts, its layers over the mapped file, its tokenizer, and the float32 weights in use."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from frink_numba import settings
from frink_numba.errors import FrinkError, GgufError, UnsupportedModelError
from frink_numba.host.architectures import Architecture
from frink_numba.host.gguf import GgufFile
from frink_numba.host.hyperparameters import Hyperparameters
from frink_numba.host.layers import ModelTensors
from frink_numba.host.weights import WeightStore

if TYPE_CHECKING:
    import numpy as np

    from frink_numba.host.chat import ChatTemplate
    from frink_numba.host.tokenizer import Tokenizer
    from frink_numba.layer import Layer
    from frink_numba.quant import QuantMatrix


class Closable(Protocol):
    """Something that holds on to a model's weights."""

    def close(self) -> None: ...


class Model:
    """Made by `load`; a context manager.

    `architecture`, `hyper`: the facts; `layers`; `embedding`, `output`: [vocab, hidden], one and the same when the file
    has no output matrix; `output_norm` float32 [hidden]; `vocab_size`: rows of the embedding, and logits of a position
    (a tokenizer may know fewer tokens); `context_length`: the most positions a cache may hold; `gguf`: the open file;
    `weights`: float32 copies of weights for the host, within the budget of FRINK_HOST_WEIGHTS, shared by all decoders
    of this model.

    `close` also closes the decoders made from it, and gives back memory and the mapping. A closed model raises
    FrinkError.
    """

    def __init__(
        self,
        gguf: GgufFile,
        architecture: Architecture,
        hyper: Hyperparameters,
        tensors: ModelTensors,
        context_length: int,
    ) -> None:
        self.gguf = gguf
        self.architecture = architecture
        self.hyper = hyper
        self.context_length = context_length
        self.vocab_size = tensors.embedding.rows
        self.weights = WeightStore(settings.get("FRINK_HOST_WEIGHTS"))
        self._tensors: ModelTensors | None = tensors  # None: closed
        self._lock = threading.Lock()
        self._users: weakref.WeakSet[Closable] = weakref.WeakSet()

    @property
    def layers(self) -> tuple[Layer, ...]:
        return self._open().layers

    @property
    def embedding(self) -> QuantMatrix:
        return self._open().embedding

    @property
    def output(self) -> QuantMatrix:
        return self._open().output

    @property
    def output_norm(self) -> np.ndarray:
        return self._open().output_norm

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Built at first use. UnsupportedModelError when the file's tokenizer is not served."""
        from frink_numba.host.tokenizer import Tokenizer

        self.check_open()
        with self._named():
            tokenizer = Tokenizer.from_metadata(self.gguf.metadata)
        if tokenizer.vocab_size > self.vocab_size:
            raise GgufError(
                f"{self.gguf.paths[0]}: the tokenizer has {tokenizer.vocab_size} tokens, "
                f"but token_embd.weight only {self.vocab_size} rows"
            )
        return tokenizer

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The file's chat template, built at first use."""
        from frink_numba.host.chat import ChatTemplate

        tokenizer = self.tokenizer
        with self._named():
            return ChatTemplate.from_metadata(self.gguf.metadata, tokenizer)

    @property
    def closed(self) -> bool:
        return self._tensors is None

    def check_open(self) -> None:
        """FrinkError when the model was closed."""
        self._open()

    def add_user(self, user: Closable) -> None:
        """Close `user` before the model's weights go."""
        with self._lock:
            self.check_open()
            self._users.add(user)

    def close(self) -> None:
        """Give back everything; may be called twice."""
        with self._lock:
            self._tensors = None
            users = list(self._users)
        for user in users:
            user.close()
        self.weights.close()
        self.gguf.close()

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Errors about the metadata say which file it is of."""
        try:
            yield
        except (GgufError, UnsupportedModelError) as error:
            raise type(error)(f"{self.gguf.paths[0]}: {error}") from error

    def _open(self) -> ModelTensors:
        tensors = self._tensors
        if tensors is None:
            raise FrinkError(f"the model {self.gguf.paths[0]} is closed; load it again")
        return tensors

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        h = self.hyper
        return f"Model({str(self.gguf.paths[0])!r}: {self.architecture.name}, {h.layers} layers of {h.hidden})"

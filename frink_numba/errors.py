"""Every error this package raises on purpose. Each message says what was wrong, where, and what to do."""

from __future__ import annotations


class FrinkError(Exception):
    """Base of all errors raised by frink_numba."""


class SettingError(FrinkError, ValueError):
    """An environment variable or an argument has a value that cannot be read."""


class GgufError(FrinkError, ValueError):
    """A GGUF file is damaged, hostile, or not a GGUF file: names the file, and the key or tensor."""


class UnsupportedModelError(FrinkError, ValueError):
    """The file is sound, but holds an architecture, tokenizer or feature that is not served."""


class ModelNotFoundError(FrinkError, FileNotFoundError):
    """A model name or path leads to no file; says how to fetch one."""


class FetchError(FrinkError, OSError):
    """A download failed, or what arrived has the wrong checksum."""


class TokenizerError(FrinkError, ValueError):
    """Text or token ids that the tokenizer cannot take."""


class ChatTemplateError(FrinkError, ValueError):
    """A chat template that is missing, broken or out of bounds, or messages that it refuses."""


class PromptError(FrinkError, ValueError):
    """An empty prompt, a token id outside the vocabulary, or a prompt longer than the context."""


class Cancelled(FrinkError):
    """A progress callback asked to stop a prefill; the cache stands behind the last whole chunk."""


class CacheError(FrinkError, ValueError):
    """K/V rows whose shape, position or number does not fit the cache."""


class BackendError(FrinkError, RuntimeError):
    """An unknown backend, or a layer that no backend of the given list serves."""


class BackendUnavailable(FrinkError, RuntimeError):
    """Raised by a backend's factory when it cannot run here; the message is the reason, one line.

    `absent` says that the machine simply lacks the hardware: no warning unless the user named the backend.
    """

    def __init__(self, reason: str, *, absent: bool = False) -> None:
        super().__init__(reason)
        self.absent = absent


class ShapeError(FrinkError, ValueError):
    """Shapes or dtypes that contradict each other; names both."""


class DeviceError(FrinkError, RuntimeError):
    """A device failed: out of memory, a failed launch or copy, or a lost context."""

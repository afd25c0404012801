"""What a backend is (B1), and what it is asked: a step over the layers, and the answers to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from frink_numba.layer import Layer
from frink_numba.quant import QuantMatrix


class LayerCache(Protocol):
    """The host's K/V rows of one layer, in the order of positions (R9 to R13)."""

    n_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def positions(self) -> int:
        """Positions seen so far, evicted ones included."""

    @property
    def rows(self) -> int:
        """Rows kept: `positions` less the evicted ones."""

    def prefix(self) -> tuple[np.ndarray, np.ndarray]:
        """K [rows, n_kv_heads, key_dim] and V [rows, n_kv_heads, value_dim], float32 or float16, without a copy."""


@dataclass(frozen=True, slots=True, eq=False)
class Edges:
    """What lies around a model's layers.

    Before them `hidden = embedding_scale * embedding[tokens]`, behind them `logits = output . rms_norm(hidden)`, with
    the weight `output_norm`, float32 [hidden_dim].
    """

    embedding: QuantMatrix  # [vocab, hidden_dim]
    embedding_scale: float
    output_norm: np.ndarray
    norm_eps: float
    output: QuantMatrix  # [vocab, hidden_dim]


@dataclass(slots=True, weakref_slot=True)
class Step:
    """A hidden batch on its way through the layers (R1).

    `hidden` is float32 [batch, hidden_dim], C-contiguous, and None when a plan only asks. A backend never writes to it.

    A step that begins with tokens may have `tokens` (int64 [batch]) and `edges`, and in place of `hidden` the function
    `lookup` that makes it. A backend with the attribute `takes_tokens` then gets `hidden` None when its run begins at
    layer 0, and looks the tokens up itself or calls `lookup`; a run of its that ends with the last layer may answer the
    `logits` of so many of the last rows, and `hidden` None where nothing wants it.

    `ahead` n, with `tokens` of one row: the step may go on by itself, each time with the token of the largest of the
    first `choices` logits (the first of equals, not-a-number before all), until it has chosen n of them, or fewer. A
    backend with a true attribute `goes_ahead` that runs all layers may answer these as `Run.tokens`, no `logits`, and
    as many K/V rows a layer: of the step's token and of all chosen ones but the last. Others get the step without it.

    `targets` int64 [logits], one token for each of the rows whose logits are wanted: a run that ends with the last
    layer may answer how likely they are, `Run.scores`, in place of logits.

    `keep` False: the step is a whole text whose K/V rows nobody keeps. A run may answer `kv_rows` empty, and what the
    caches tell of their rows says nothing of other steps over them.
    """

    layers: Sequence[Layer]
    caches: Sequence[LayerCache]
    start_pos: int
    batch: int
    hidden: np.ndarray | None = None
    hidden_after: frozenset[int] = field(default_factory=frozenset)  # a run ends after each of these layers
    tokens: np.ndarray | None = None
    edges: Edges | None = None
    lookup: Callable[[], np.ndarray] | None = None
    logits: int = 0
    keep: bool = True
    ahead: int = 0
    choices: int = 0
    targets: np.ndarray | None = None

    @property
    def rows(self) -> int:
        """New positions at most."""
        return max(self.batch, self.ahead)


@dataclass(frozen=True, slots=True)
class Serve:
    """Yes; `note` may say how (a tier, a device) for the plan."""

    note: str = ""


@dataclass(frozen=True, slots=True)
class Decline:
    """No, and why: one line without the layer's number, so that equal reasons are said once.

    `passing`: the answer may be another for other steps over the same layers and caches. With FRINK_INVARIANT nobody
    else may serve the step then, since results would depend on how a text is cut.
    """

    reason: str
    passing: bool = field(default=False, compare=False)


@dataclass(slots=True)
class Run:
    """What a run of layers answers.

    `hidden` float32 [batch, hidden_dim], C-contiguous; `kv_rows` one (K, V) pair a layer, float32
    [batch, n_kv_heads, head_dim], K after the rotation (R9). `experts` names the experts each layer used; None means
    expert 0 of each (R22). `logits` float32 [step.logits, vocab], where the backend made them (see `Step`). `tokens`
    int32 [1 to step.ahead], where it went ahead: the chosen ones; -1 from the first on whose logits are not numbers.
    `scores` float32 [step.logits]: natural logarithms of the probabilities of `step.targets`.

    Logits are the caller's from now on, who may change them: a backend uses their memory again when nobody has it.
    """

    hidden: np.ndarray | None
    kv_rows: Sequence[tuple[np.ndarray, np.ndarray]]
    experts: Sequence[Sequence[int]] | None = None
    logits: np.ndarray | None = None
    tokens: np.ndarray | None = None
    scores: np.ndarray | None = None


@runtime_checkable
class Backend(Protocol):
    """Serves runs of consecutive layers. Made by a factory `(layers) -> Backend` that raises BackendUnavailable.

    With FRINK_INVARIANT only backends with a true attribute `invariant` are asked: a row's results, to the bit, are
    then the same in every step that has the same rows before it, whatever else is in the step.

    A backend may answer `few_rows(step) -> (rows, rounding)` for a step of all layers: so many of its rows cost about
    what one does, and their logits differ from those of steps of one row each by less than `rounding` times the norm
    of the logits, however many such steps were before; 0.0 if all results, K/V rows too, are the same bits.

    A backend may have `expect(edges)`: steps over all layers, between these edges, are about to come, and work that
    needs none of them may begin in other threads. It returns at once.
    """

    name: str

    def can_serve(self, l: int, step: Step) -> Serve | Decline:  # noqa: E741
        """Whether layer `l` can run in this step: cheap, pure, no device work, no side effect (B1, R7)."""

    def run(self, l: int, length: int, step: Step) -> Run | None:  # noqa: E741
        """Run layers l .. l+length-1. None after a failure that was reported (R21); step and caches stay untouched."""

    def close(self) -> None:
        """Give back what the backend holds; it may be called twice."""

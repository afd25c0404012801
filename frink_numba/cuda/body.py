"""What a kernel tier makes of layers: their weights on the device, the scratch of a run, and the run itself.

A device has one body, of its tier: `simt/` serves every GPU, `tensor/` those with tensor cores. All else in this
package (admission, residency, budget, failures) is the same for both and speaks to them through this protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from frink_numba.backend import Edges
from frink_numba.cuda.traffic import Traffic
from frink_numba.cuda.weights import DeviceLayer
from frink_numba.layer import Layer

if TYPE_CHECKING:
    from frink_numba.cuda.device import Workspace

Rows: TypeAlias = tuple[np.ndarray, np.ndarray]


class KvSource:
    """One layer's K/V rows before the batch, and the cache they are from.

    prefix: K and V [start_pos, n_kv_heads, head_dim], float32 or float16, K after its rotation; or a function that
    gives them, called when somebody looks. cache: the object that owns them (see `tensor/mirror.py` for what it may
    tell), or None.
    """

    __slots__ = ("_prefix", "cache")

    def __init__(self, prefix: Rows | Callable[[], Rows], cache: Any = None) -> None:
        self._prefix = prefix
        self.cache = cache

    @property
    def prefix(self) -> Rows:
        if callable(self._prefix):
            self._prefix = self._prefix()
        return self._prefix


@dataclass(slots=True)
class Ends:
    """What a run does before its first layer and behind its last one, beside the layers.

    tokens: int [batch] to be looked up, in place of a hidden batch; or None. edges: what `Body.upload_edges` made, or
    None when neither is wanted. logits: of so many of the last rows. hidden: whether the hidden batch comes down.
    first: the model's number of the run's first layer, for those who watch.

    cache: that of all layers, where the run covers them and it lends room as a whole; `sources` are empty then.

    ahead: so many tokens are chosen among the first `choices`, the first of them from that of `tokens`, and nothing
    comes down but these and K/V rows; 0 for an ordinary run.
    """

    tokens: np.ndarray | None = None
    edges: Any = None
    logits: int = 0
    hidden: bool = True
    first: int = 0
    cache: Any = None
    ahead: int = 0
    choices: int = 0


WHOLE = Ends()


@dataclass(slots=True)
class Member:
    """One sequence of a group, from tokens to what is wanted of its last rows.

    tokens: int [rows]. cache: the K/V cache of all layers, which lends room as a whole; None: nobody keeps the rows.
    logits: of so many of the last rows; of their logits `choose` wants the likeliest token alone, among so many, and
    `targets`, int [logits], how likely these are. ahead: of one row, so many tokens are chosen one after the other.
    """

    tokens: np.ndarray
    start_pos: int
    cache: Any
    logits: int
    choose: int = 0
    targets: np.ndarray | None = None
    ahead: int = 0

    @property
    def rows(self) -> int:
        """New positions at most."""
        return max(len(self.tokens), self.ahead)


@dataclass(slots=True)
class Share:
    """A member's part of a group's answer; `rows`: each layer's K and V, or the lease that they were written to.

    tokens: those of its rows, or of a group that goes ahead those chosen one after the other; -1: from no numbers.
    """

    hidden: np.ndarray | None
    rows: Sequence[Rows]
    logits: np.ndarray | None = None
    tokens: np.ndarray | None = None
    scores: np.ndarray | None = None


class Answer(NamedTuple):
    """The new hidden batch, each layer's K/V rows float32 [batch, n_kv_heads, head_dim], and logits, where wanted.

    Of a run that goes ahead, K/V rows [ahead, ...], and the tokens int32 [ahead]: see `frink_numba.backend.Run`.
    """

    hidden: np.ndarray | None
    rows: Sequence[Rows]
    logits: np.ndarray | None = None
    tokens: np.ndarray | None = None


class ScratchSize(Protocol):
    def nbytes(self, batch: int, start_pos: int, edges: Edges | None = None, logits: int = 0) -> int:
        """Bytes of scratch of a run of any of the layers, for `batch` rows from position `start_pos` on.

        edges: whose output matrix makes `logits` rows of logits; None where the run makes none.
        """


class Body(Protocol):
    """Every method but the first two, `expect` and `unexpect` is used under the device's `working()`."""

    @property
    def tier(self) -> str: ...

    @property
    def least_batch(self) -> int:
        """Rows of the smallest batch that is worth the device (R2)."""

    @property
    def chunk_size(self) -> int:
        """Rows of a step that keep the device busy."""

    @property
    def invariant(self) -> bool:
        """Whether a row's result, to the bit, is the same in every step over the same rows before it."""

    def judged(self, layer: Layer) -> Layer:
        """The layer without what this tier serves beyond the table of `classify.py`."""

    def why_not(self, layer: Layer) -> str | None:
        """Why this tier cannot run a layer that others can, in one line; None when it can. From the description."""

    def layer_bytes(self, layer: Layer) -> int:
        """Bytes that the layer's weights take on the device. From the description."""

    def scratch(self, layers: Sequence[Layer]) -> ScratchSize:
        """The scratch of runs over any of `layers`, at least one. From the descriptions."""

    def mirror_bytes(self, layer: Layer, cache: Any, positions: int) -> int:
        """Bytes of device memory that the layer's K/V rows of `positions` positions take beside the scratch."""

    def few_rows(self, layers: Sequence[Layer], edges: Edges) -> Callable[[int], int] | None:
        """For a step from a position on: how many rows cost about what one does and get the bits of steps of their own.

        None where a step of one row is nothing that the tier is for.
        """

    @property
    def most_ahead(self) -> int:
        """Tokens that a run of one row may choose by itself; 0 where the tier cannot."""

    @property
    def mirrors_rows(self) -> bool:
        """Whether K/V rows stay on the device, so that a run need not look at all those before it."""

    def room(self, cache: Any) -> int:
        """Positions whose K/V rows fit into the device memory that this cache has."""

    def mirror_held(self, cache: Any) -> int:
        """Bytes of device memory that this cache's rows take now."""

    @property
    def mirrored_bytes(self) -> int:
        """Bytes of device memory that all K/V rows take now."""

    @property
    def changes(self) -> int:
        """Grows whenever memory of K/V rows is taken or given back."""

    def forget(self, nbytes: int, keep: Sequence[Any] = ()) -> None:
        """Give back at least `nbytes` of device memory of K/V rows if there are, except those of the caches `keep`."""

    def forget_unused(self) -> None:
        """Give back the device memory of K/V rows whose caches are gone."""

    @property
    def most_sequences(self) -> int:
        """Sequences of a group; 0: the tier runs none, and has none of the three methods that follow."""

    def group_bytes(self, layers: Sequence[Layer], edges: Edges, members: Sequence[Member]) -> int:
        """Bytes of scratch of a step of `members` over all of a model's layers."""

    def group_room(self, cache: Any) -> int:
        """Positions for which a cache of all layers is known to have room on the device; 0 where nothing is known."""

    def run_group(
        self,
        work: Workspace,
        layers: Sequence[Any],
        edges: Any,
        members: Sequence[Member],
        block: Any,
        traffic: Traffic,
        hidden: bool,
    ) -> list[Share]:
        """Take the tokens of all members through the model; `hidden`: whether the hidden batch comes down."""

    def expect(self, owner: object, layers: Sequence[Layer], edges: Edges | None) -> None:
        """`owner` is going to have these uploaded, in this order: work without the device may begin, in other threads.

        What was expected before and did not come is not any more.
        """

    def unexpect(self, owner: object) -> None:
        """What `owner` announced will not come: let go of it, and wait for what is being done."""

    def preparing(self, layers: Sequence[Layer]) -> AbstractContextManager[None]:
        """Inside it, `layers` are going to be uploaded, in this order: work that needs no device may go ahead."""

    def upload(self, layer: Layer, stream: Any, traffic: Traffic) -> DeviceLayer:
        """Allocate the layer's memory and fill it in the order of `stream`."""

    def why_not_edges(self, edges: Edges) -> str | None:
        """Why this tier neither looks tokens up nor makes logits; None when it does."""

    def edges_bytes(self, edges: Edges) -> int:
        """Bytes that they take on the device. From the description."""

    def upload_edges(self, edges: Edges, stream: Any, traffic: Traffic) -> DeviceLayer:
        """As `upload`; `.layer` of what is made is `edges`."""

    def dropped(self) -> None:
        """Layers or scratch were given back: let go of what refers to them."""

    def run(
        self,
        work: Workspace,
        layers: Sequence[Any],
        hidden: np.ndarray | None,
        sources: Sequence[KvSource],
        start_pos: int,
        block: Any,
        traffic: Traffic,
        ends: Ends = WHOLE,
    ) -> Answer:
        """Take `hidden` [batch, hidden_dim], or `ends.tokens`, through uploaded `layers`; shapes are checked already.

        `block`: scratch of at least `scratch(...).nbytes`. K rows are answered after the rotation; all arrays are the
        caller's. Raises what the runtime and the kernels raise, once nothing runs on the device any more.
        """

"""The `cuda` backend: runs of layers on a device's resident stack (R2 to R22)."""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from frink_numba.backend import Decline, Edges, LayerCache, Run, Serve, Step
from frink_numba.cuda.admission import Admission
from frink_numba.cuda.body import Ends, KvSource, Rows
from frink_numba.cuda.device import CudaDevice, open_device
from frink_numba.cuda.group import Groups
from frink_numba.cuda.reasons import cache_reason, static_reason
from frink_numba.cuda.residency import hold_layers, release_holder
from frink_numba.cuda.runtime import one_line
from frink_numba.cuda.settled import Settled
from frink_numba.cuda.shapes import check_hidden, check_prefix
from frink_numba.cuda.traffic import Traffic
from frink_numba.cuda.weights import DeviceLayer
from frink_numba.errors import BackendUnavailable, DeviceError, ShapeError
from frink_numba.layer import Layer
from frink_numba.log import warn_once
from frink_numba.plan import Memory


def create(layers: Sequence[Layer], device: str | None = None) -> CudaBackend:
    """The backend over a model's layers on the first visible device, or on the one numbered `device` ("1" of "cuda:1").

    BackendUnavailable says why the device cannot be used.
    """
    if device is not None and not device.isdecimal():
        raise BackendUnavailable(f"{device!r} is not a device number; write cuda:0, cuda:1, ...")
    number = int(device or 0)
    made = CudaBackend(layers, open_device(number), "cuda" if device is None else f"cuda:{number}")
    # Making a context takes as long as a tokenizer does, and the one waits for the driver while the other computes. Not
    # a daemon: a process that ends at once lets the driver finish.
    threading.Thread(target=_make_context, args=(made.device,), name="frink-context").start()
    return made


class CudaBackend:
    """Serves runs of layers on one device. Several threads may use it; their runs follow each other.

    Weights go up with the first run of their layer and stay until `close`; other backends over the same layers and the
    same device share them.
    """

    takes_tokens = True

    def __init__(self, layers: Sequence[Layer], device: CudaDevice, name: str = "cuda") -> None:
        self.name = name
        self.device = device
        self._layers = tuple(layers)
        self._reasons = [static_reason(layer, device.body) for layer in self._layers]
        served = [number for number, reason in enumerate(self._reasons) if reason is None]
        self._holder = object()
        self._serve = Serve(str(device))
        self._admission = Admission(device, self._layers, served, self._holder)
        self._settled: Settled | None = None
        self._expected = False  # whether weights are repacked, or were
        self._few_rows: tuple[Edges, Callable[[int], int] | None] | None = None
        together = len(served) == len(self._layers) > 0 and device.body.most_sequences > 0
        self._groups = Groups(device, self._layers, self._holder) if together else None
        self._traffic = Traffic()
        self._traffic_lock = threading.Lock()
        # A backend that is dropped without `close` gives its memory back too; at exit the driver does.
        weakref.finalize(self, _dropped, name, device, self._holder).atexit = False

    @property
    def chunk_size(self) -> int:
        """Rows of a step that keep the device busy, its scratch within bounds."""
        return self.device.body.chunk_size

    @property
    def goes_ahead(self) -> bool:
        """Whether a step of one row may choose tokens by itself."""
        return self.device.body.most_ahead > 0

    @property
    def invariant(self) -> bool:
        """Whether results do not depend on how rows are cut into steps (FRINK_INVARIANT)."""
        return self.device.body.invariant

    @property
    def scores(self) -> bool:
        """Whether groups are served, which may answer how likely given tokens are in place of logits."""
        return self._groups is not None

    @property
    def stats(self) -> Traffic:
        """What went over the bus since the backend was made: a copy."""
        with self._traffic_lock:
            return self._traffic.copy()

    def expect(self, edges: Edges | None) -> None:
        """Steps over all layers are about to come: weights are repacked meanwhile, once, if all of them can be held."""
        known = zip(self._layers, self._reasons, strict=True)
        served = [x for x, reason in known if reason is None and not self.device.bank.has(x)]
        fits = self.device.memory.allows(self._admission.total, self.device.info.memory)
        if self._expected or not served or not fits or self.device.problem is not None:
            return
        self._expected = True
        ends = edges if edges is not None and self.device.body.why_not_edges(edges) is None else None
        self.device.body.expect(self._holder, served, ends)

    def can_serve(self, l: int, step: Step) -> Serve | Decline:  # noqa: E741
        """Serve with the device and its tier, or the first reason that the device, step, layer, cache or memory gives.

        Without FRINK_CUDA_MEMORY the first call asks the device once how much memory is free.
        """
        problem = self.device.problem
        if problem is not None:
            return Decline(problem, passing=True)
        least = self.device.body.least_batch
        if step.batch < least:
            return Decline(f"a batch of fewer than {least} rows", passing=True)
        if step.layers[l] is not self._layers[l]:
            return Decline("the step's layer is not the one the backend was made for")
        reason = self._reasons[l] or self._rounding_reason(step.caches[l])
        if reason is not None:
            return Decline(reason)
        reason = cache_reason(step.caches[l], self._layers[l], step.start_pos)
        if reason is not None:
            return Decline(reason, passing=True)
        try:
            reason = self._admission.reason(l, step)
        except Exception as error:  # numba, cuda.core and cuda.bindings each have classes of their own
            reason = f"its free memory is not known: {self.device.failed(error)}"
        return self._serve if reason is None else Decline(reason, passing=True)

    def few_rows(self, step: Step) -> tuple[int, float]:
        """See `Backend`: the same bits, where the step ends with logits that the device makes.

        Rows of a float16 cache come back from the host with the next step, and not within one.
        """
        edges = step.edges
        if edges is None or self.device.bank.find(edges, self._holder) is None:
            return 1, 0.0
        if any(cache.prefix()[0].dtype != np.float32 for cache in step.caches[:1]):
            return 1, 0.0
        if self._few_rows is None or self._few_rows[0] is not edges:
            self._few_rows = edges, self.device.body.few_rows(self._layers, edges)
        at = self._few_rows[1]
        return (1 if at is None else at(step.start_pos)), 0.0

    def serves_all(self, step: Step) -> Serve | None:
        """Serve when a step is like one that just ran, so that every layer need not be asked; None is no answer.

        The weights are there, and K/V memory holds the new rows too.
        """
        settled = self._settled
        if settled is None or self.device.problem is not None:
            return None
        self.device.memory.bytes()  # of now
        if not settled.holds(self.device, step):
            return None
        start = step.start_pos
        if self._whole_cache(step) is None:
            for cache in step.caches:
                if cache.positions != start or cache.rows != start:
                    return None
        return self._serve if all(map(operator.is_, step.layers, self._layers)) else None

    def run(self, l: int, length: int, step: Step) -> Run | None:  # noqa: E741
        """Run layers l .. l+length-1; None after a failure, which was reported (R21).

        ShapeError, before any device work, when the step's arrays do not fit the layers (R20).
        """
        every = length == len(self._layers)
        layers = self._layers if every else self._layers[l : l + length]
        if step.hidden is None and (l or step.lookup is None or step.tokens is None):
            raise ShapeError("a step to run needs a hidden batch")
        if step.hidden is not None:
            check_hidden(step.hidden, step.batch, layers)
        whole = self._whole_cache(step) if every else None
        sources = []
        if whole is None:
            caches = step.caches[l : l + length]
            sources = [
                KvSource(functools.partial(_prefix, layer, cache, step.start_pos), cache)
                for layer, cache in zip(layers, caches, strict=True)
            ]
        if not self.device.body.mirrors_rows:
            for source in sources:
                _ = source.prefix  # checked before any device work

        traffic = Traffic()
        device = self.device
        try:
            with device.working():
                settled = self._settled
                if settled is not None and settled.holds(device, step):
                    together = device.bank.get_all(self._layers)
                    resident: Sequence[DeviceLayer] = together if every else together[l : l + length]
                    block = device.workspace.arena.reserve(0, 0)
                else:
                    resident, block = self._make_room(l, layers, step, traffic)
                ends = self._ends(l, length, step, traffic)
                ends.first, ends.cache = l, whole
                hidden = step.hidden
                if hidden is None and ends.tokens is None and step.lookup is not None:
                    hidden = step.lookup()
                    check_hidden(hidden, step.batch, layers)
                answer = device.body.run(
                    device.workspace, resident, hidden, sources, step.start_pos, block, traffic, ends
                )
                if every:
                    self._settle(step)
        except Exception as error:  # numba, cuda.core and cuda.bindings each have classes of their own
            failure = device.problem or device.failed(error)
            warn_once(f"backend {self.name}: a run failed after it was admitted, others serve its layers: {failure}")
            return None
        finally:
            with self._traffic_lock:
                self._traffic.add(traffic)
        return Run(answer.hidden, answer.rows, logits=answer.logits, tokens=answer.tokens)

    def serves_group(self, steps: Sequence[Step]) -> Serve | None:
        """Serve when all layers of all steps can run at once, so that one call takes them (`run_group`)."""
        return self._serve if self._groups is not None and self._groups.serves(steps) else None

    def run_group(self, steps: Sequence[Step]) -> list[Run] | None:
        """Run all layers of steps that `serves_group` serves; None after a failure, which was reported (R21)."""
        traffic, device = Traffic(), self.device
        assert self._groups is not None  # it has served them
        try:
            with device.working():
                return self._groups.run(steps, traffic)
        except Exception as error:  # numba, cuda.core and cuda.bindings each have classes of their own
            failure = device.problem or device.failed(error)
            warn_once(f"backend {self.name}: a group failed after it was admitted, its steps run alone: {failure}")
            return None
        finally:
            with self._traffic_lock:
                self._traffic.add(traffic)

    def _whole_cache(self, step: Step) -> Any:
        """The step's caches as one that lends room in all layers at once, and lacks no row; None where they are not.

        Where results must not depend on chunks, each layer is looked at.
        """
        cache: Any = step.caches
        if self.invariant or not self.device.body.mirrors_rows or not hasattr(cache, "places"):
            return None
        return None if cache.evicted or cache.positions != step.start_pos else cache

    def _rounding_reason(self, cache: LayerCache) -> str | None:
        """Where rows stay float32 within a step, a cache of float16 makes the next step see others."""
        if not self.invariant or self.device.body.mirrors_rows or cache.prefix()[0].dtype == np.float32:
            return None
        return f"FRINK_INVARIANT=1 and the {self.device.tier} tier need a cache of float32"

    def _new_rows_bytes(self, number: int, step: Step) -> int:
        """Bytes that layer `number`'s K/V rows will take on the device beside those they take now."""
        return self._admission.mirror(number, step) - self.device.body.mirror_held(step.caches[number])

    def _settle(self, step: Step) -> None:
        """Remember that the step ran as a whole."""
        if self._settled is None or not self._settled.holds(self.device, step):
            try:
                caches = weakref.ref(step.caches)
            except TypeError:  # a plain list of caches
                return
            room = min(self.device.body.room(cache) for cache in step.caches)
            settled, state = self._settled, self.device.state
            if settled is None or not settled.alike(step, room, state):
                settled = self._settled = Settled(caches, set(), room, state, step.edges)
            settled.sizes.add((step.batch, step.logits))

    def _ends(self, l: int, length: int, step: Step, traffic: Traffic) -> Ends:  # noqa: E741
        """What the run does beside its layers; under `working()`, when layers and scratch are in place.

        Embedding and output matrix go up with the first step that they have room beside.
        """
        last, edges = l + length == len(self._layers), step.edges
        hidden = not last or l + length - 1 in step.hidden_after or step.tokens is None or step.logits > 0
        takes, gives = step.hidden is None, last and step.logits > 0
        device = self.device
        if edges is None or not (takes or gives):
            return Ends(hidden=hidden)
        held = device.bank.find(edges, self._holder)
        if held is None:
            if device.body.why_not_edges(edges) is not None:
                return Ends(hidden=hidden)
            rows = sum(self._new_rows_bytes(number, step) for number in range(l, l + length))
            need = rows + device.body.edges_bytes(edges)
            if device.held_bytes + need > device.memory.bytes():
                device.body.forget_unused()
            if device.held_bytes + need > device.memory.bytes():
                if self.invariant:  # the host's logits, after this step or others, would have other bits
                    raise DeviceError("FRINK_INVARIANT=1 and no room for the embedding and the output matrix")
                return Ends(hidden=hidden)
            held = device.body.upload_edges(edges, device.workspace.compute, traffic)
            device.bank.add(held, self._holder)
        if step.ahead and takes and gives and length == len(self._layers) and not step.hidden_after:
            ahead = min(step.ahead, device.body.most_ahead)
            return Ends(step.tokens, held, hidden=False, ahead=ahead, choices=min(step.choices, edges.output.rows))
        wanted = (hidden and not gives) or l + length - 1 in step.hidden_after
        return Ends(step.tokens if takes else None, held, step.logits if gives else 0, wanted)

    def memory(self, runs: Sequence[tuple[int, int]], step: Step) -> Memory:
        """What the device holds after `step`, in which this backend serves `runs`: (first layer, number of layers).

        To the byte for a step that needs nothing to be dropped first. Asks, and changes nothing.
        """
        device, body = self.device, self.device.body
        weights = device.bank.nbytes - device.bank.bytes_of_others(self._holder)
        edges = self._admission.edges_held(step)
        weights -= edges
        others = device.bank.bytes_of_others(self._holder) + body.mirrored_bytes
        scratch, kv_rows, page_locked, budget = device.arena_bytes, 0, 0, device.memory.bytes()
        positions = step.start_pos + step.rows
        for first, length in runs:
            numbers, layers = range(first, first + length), self._layers[first : first + length]
            weights += sum(body.layer_bytes(layer) for layer in layers if not device.bank.holds(layer, self._holder))
            exact = self._admission.run_scratch(body.scratch(layers), step)
            if exact > scratch:
                scratch = exact + max(0, min(exact // 4, self._spare(exact, step)))
            kv_rows += sum(self._admission.mirror(number, step) for number in numbers)
            # Rows that need more room move, and the block that they leave is kept for other caches.
            stay = [step.caches[number] for number in numbers if body.room(step.caches[number]) >= positions]
            others -= sum(map(body.mirror_held, stay))
            page_locked += sum(_row_bytes(step.caches[number], positions) for number in numbers)
            wanted = first == 0 or (first + length == len(self._layers) and step.logits > 0)
            if step.edges is None or edges or not wanted or body.why_not_edges(step.edges) is not None:
                continue
            need = body.edges_bytes(step.edges)
            edges = need if weights + scratch + kv_rows + others + need <= budget else 0
        return Memory(self.name, weights, edges, scratch, kv_rows, others, budget, page_locked)

    def _spare(self, exact: int, step: Step) -> int:
        """Bytes by which scratch of `exact` may be larger for steps to come, which spares it to be made anew."""
        spare = self._admission.spare(step) - exact
        if self.device.body.mirrors_rows:  # positions do not matter, and no chunk has more rows
            spare = min(spare, self._admission.most_scratch(step) - exact)
        return max(0, spare)

    def host_bytes(self, nbytes: int) -> np.ndarray:
        """Page-locked host memory, uint8 [nbytes]: K/V rows of a cache that lies there come down without a copy.

        Ordinary memory where there is none to lock.
        """
        if not nbytes:
            return np.empty(0, np.uint8)
        try:
            with self.device.working():
                return self.device.workspace.pinned.lend(nbytes)
        except Exception as error:  # numba, cuda.core and cuda.bindings each have classes of their own
            warn_once(
                f"backend {self.name}: no page-locked memory for caches: {self.device.problem or one_line(error)}"
            )
            return np.empty(nbytes, np.uint8)

    def close(self) -> None:
        """Give the device memory back; may be called twice. A later run would upload the weights again."""
        self._settled = None
        _let_go(self.name, self.device, self._holder)

    def _make_room(
        self,
        first: int,
        layers: Sequence[Layer],
        step: Step,
        traffic: Traffic,
    ) -> tuple[list[DeviceLayer], object]:
        """The layers on the device and the scratch for their run, with room for their new K/V rows.

        K/V rows of other caches, and own layers that this step does not need, may go.
        """
        device, bank, body = self.device, self.device.bank, self.device.body
        scratch = self._admission.scratch(step)
        missing = sum(body.layer_bytes(layer) for layer in layers if bank.find(layer, self._holder) is None)
        for number in range(first, first + len(layers)):
            missing += self._new_rows_bytes(number, step)
        caches, total = list(step.caches[first : first + len(layers)]), step.start_pos + step.rows
        # A cache that grows is there twice while its rows are moved; without room for that, they go up again.
        growing = sum(body.mirror_held(cache) for cache in caches if body.room(cache) < total)
        over = bank.nbytes + body.mirrored_bytes + missing + scratch - device.memory.bytes()
        if over + growing > 0:
            before = body.mirrored_bytes
            body.forget(over + growing, keep=caches)
            over -= before - body.mirrored_bytes
            if growing and over + growing > 0:
                before = body.mirrored_bytes
                body.forget(before)
                over += growing - (before - body.mirrored_bytes)
        if over > 0:
            needed = {id(self._layers[number]) for number in self._admission.admitted()} | {id(x) for x in layers}
            for layer in bank.held_by(self._holder):
                if over > 0 and id(layer) not in needed:
                    over -= bank.get(layer).nbytes
                    bank.drop(layer, self._holder)
            body.dropped()
            if over > 0:  # rows of layers that go to the host lie in one block with the run's: these go up again
                body.forget(body.mirrored_bytes)
            device.runtime.release()
        resident = hold_layers(device, layers, self._holder, traffic, scratch)
        exact = self._admission.run_scratch(body.scratch(layers), step)
        return resident, device.workspace.arena.reserve(exact, self._spare(exact, step))


def _make_context(device: CudaDevice) -> None:
    """Make the device's context and streams, which its first step needs; what fails here fails there, and is said."""
    with contextlib.suppress(Exception), device.working():
        _ = device.workspace


def _row_bytes(cache: LayerCache, positions: int) -> int:
    """Bytes of a layer's K/V rows in the host's cache."""
    width = cache.key_dim + cache.value_dim
    return positions * cache.n_kv_heads * width * cache.prefix()[0].dtype.itemsize


def _prefix(layer: Layer, cache: LayerCache, start_pos: int) -> Rows:
    """K and V of the positions before the batch, checked."""
    keys, values = cache.prefix()
    check_prefix(layer, keys, values, start_pos)
    return keys, values


def _let_go(name: str, device: CudaDevice, holder: object) -> None:
    try:
        device.body.unexpect(holder)
        release_holder(device, holder)
    except Exception as error:  # a device that fails while it is left alone need not stop anybody
        warn_once(f"backend {name}: the device failed while it was closed: {device.failed(error)}")


def _dropped(name: str, device: CudaDevice, holder: object) -> None:
    """`_let_go`, from wherever the collector came by: maybe a thread that a run on the device is waiting for."""
    let_go = threading.Thread(target=_let_go, args=(name, device, holder), name="frink-let-go")
    (let_go.run if device.idle() else let_go.start)()

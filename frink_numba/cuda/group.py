"""Groups of steps on one device: several sequences through all layers at once, when all of them fit."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from frink_numba.backend import Edges, Run, Step
from frink_numba.cuda.body import Member, Share
from frink_numba.cuda.device import CudaDevice
from frink_numba.cuda.residency import hold_layers
from frink_numba.cuda.traffic import Traffic
from frink_numba.cuda.weights import DeviceLayer
from frink_numba.layer import Layer

_GRANULE = 256  # positions that memory of K/V rows is counted in here, at most as many as it is made in


class Groups:
    """Answers for one backend over `layers`, all of which its kernels serve."""

    def __init__(self, device: CudaDevice, layers: Sequence[Layer], holder: object) -> None:
        body = device.body
        self._device, self._layers, self._holder = device, layers, holder
        self._weights = sum(body.layer_bytes(layer) for layer in layers)
        self._position = sum(body.mirror_bytes(layer, object(), _GRANULE) for layer in layers) // _GRANULE  # bytes
        self._known: tuple[Any, ...] = ()  # layers and edges of a step that were found to be served
        self._settled: tuple[int, int, int, int] | None = None  # state of the device in which weights lie there

    def serves(self, steps: Sequence[Step]) -> bool:
        """Whether all of them can go through all layers together: from tokens, and within the memory budget."""
        body, first = self._device.body, steps[0]
        if self._device.problem is not None or len(steps) > body.most_sequences or not self._knows(first):
            return False
        for step in steps:
            if step.hidden is not None or step.tokens is None or step.keep is not first.keep:
                return False
            if step.layers is not first.layers or step.edges is not first.edges:
                return False
            if not (self._lends(step) if step.keep else step.start_pos == 0):
                return False
        assert first.edges is not None  # it is known
        members = [member(step, body.most_ahead) for step in steps]
        rows = sum(self._row_bytes(one, self._capacity(one)) for one in members)
        need = (
            self._weights + body.edges_bytes(first.edges) + rows + body.group_bytes(self._layers, first.edges, members)
        )
        return need + self._device.bank.bytes_of_others(self._holder) <= self._device.memory.bytes()

    def run(self, steps: Sequence[Step], traffic: Traffic) -> list[Run]:
        """Run them; under `device.working()`. Raises what the device raises."""
        edges, device = steps[0].edges, self._device
        assert edges is not None  # `serves` has seen it
        members = [member(step, device.body.most_ahead) for step in steps]
        resident, held, block = self._make_room(edges, members, traffic)
        last = len(self._layers) - 1
        hidden = any(last in step.hidden_after for step in steps)
        shares: list[Share] = device.body.run_group(device.workspace, resident, held, members, block, traffic, hidden)
        self._settled = device.state
        return [
            Run(share.hidden, share.rows, logits=share.logits, tokens=share.tokens, scores=share.scores)
            for share in shares
        ]

    def _knows(self, step: Step) -> bool:
        """Whether the step is over the backend's layers, between edges that the device can do."""
        if self._known and self._known[0] is step.layers and self._known[1] is step.edges:
            return True
        if step.edges is None or self._device.body.why_not_edges(step.edges) is not None:
            return False
        if len(step.layers) != len(self._layers) or not all(map(operator.is_, step.layers, self._layers)):
            return False
        self._known = step.layers, step.edges
        return True

    def _lends(self, step: Step) -> bool:
        """Whether the step's caches are one that lends room as a whole (R12, R13)."""
        cache: Any = step.caches
        if not hasattr(cache, "places") or cache.positions != step.start_pos or cache.evicted:
            return False
        if cache.layers is step.layers:
            return True
        return len(cache) == len(self._layers) and all(
            (rows.n_kv_heads, rows.key_dim, rows.value_dim)
            == (layer.attention.n_kv_heads, layer.attention.head_dim, layer.attention.head_dim)
            for rows, layer in zip(cache, self._layers, strict=True)
        )

    def _capacity(self, one: Member) -> int:
        """Positions that the member's mirrors will hold."""
        if one.cache is None:
            return 0
        wanted, room = one.start_pos + one.rows, self._device.body.group_room(one.cache)
        if room >= wanted:
            return int(room)
        if room:
            wanted += wanted // 4
        return -(-wanted // _GRANULE) * _GRANULE

    def _row_bytes(self, one: Member, positions: int) -> int:
        return 0 if one.cache is None else positions * self._position

    def _make_room(
        self, edges: Edges, members: Sequence[Member], traffic: Traffic
    ) -> tuple[list[DeviceLayer], DeviceLayer, Any]:
        """Layers, edges and scratch on the device, with room for the members' new K/V rows.

        K/V rows of other caches may go.
        """
        device, bank, body = self._device, self._device.bank, self._device.body
        arena = device.workspace.arena
        scratch = max(body.group_bytes(self._layers, edges, members), arena.nbytes)
        short = [one for one in members if one.cache is not None and self._capacity(one) > body.group_room(one.cache)]
        if short or scratch > arena.nbytes or self._settled != device.state:
            missing = sum(body.layer_bytes(layer) for layer in self._layers if bank.find(layer, self._holder) is None)
            if bank.find(edges, self._holder) is None:
                missing += body.edges_bytes(edges)
            # A cache that grows is there twice while its rows are moved.
            missing += sum(self._row_bytes(one, self._capacity(one)) for one in short)
            over = bank.nbytes + body.mirrored_bytes + missing + scratch - device.memory.bytes()
            if over > 0:
                before = body.mirrored_bytes
                body.forget(over, keep=[layer for one in members if one.cache is not None for layer in one.cache])
                over -= before - body.mirrored_bytes
            if over > 0:  # without room for that, they go up again
                body.forget(body.mirrored_bytes)
        resident = hold_layers(device, self._layers, self._holder, traffic, scratch)
        held = bank.find(edges, self._holder)
        if held is None:
            held = body.upload_edges(edges, device.workspace.compute, traffic)
            bank.add(held, self._holder)
        return resident, held, arena.reserve(scratch, 0)


def member(step: Step, most_ahead: int) -> Member:
    """A step as one of a group, which goes ahead by so many tokens at most."""
    tokens = step.tokens
    assert tokens is not None  # `Groups.serves` has seen it
    cache = step.caches if step.keep else None
    choose = step.choices if step.ahead else 0
    targets = None if step.targets is None else np.asarray(step.targets)
    ahead = min(step.ahead, most_ahead) if step.keep and not step.hidden_after else min(step.ahead, 1)
    return Member(tokens, step.start_pos, cache, step.logits, choose, targets, ahead)

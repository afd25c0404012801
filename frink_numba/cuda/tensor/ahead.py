"""A run that goes on by itself: tokens are chosen on the device and looked up there, without the host in between.

Its program ends with the choice of the token, which leaves the id where the next step looks it up, and moves positions
and the records of all layers one further. So a step is one replay of one graph, and n steps are n of them, queued one
behind the other. The K/V rows of step i lie at row i of each layer's room; all come down together behind the last step,
as do the ids, and the calling thread waits once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from frink_numba.cuda.body import Answer, Ends
from frink_numba.cuda.ranges import Ranges
from frink_numba.cuda.runtime import Runtime
from frink_numba.cuda.tensor.program import Program, fill_image, launch
from frink_numba.cuda.tensor.row_targets import RowTargets
from frink_numba.cuda.tensor.scratch import AHEAD_ROWS
from frink_numba.cuda.traffic import Traffic

if TYPE_CHECKING:
    from frink_numba.cuda.device import Workspace


def go_ahead(
    runtime: Runtime,
    work: Workspace,
    traffic: Traffic,
    ranges: Ranges | None,
    program: Program,
    make_targets: Callable[[int], RowTargets],
    start_pos: int,
    ends: Ends,
) -> Answer:
    """Choose `ends.ahead` tokens, at most AHEAD_ROWS, behind the one of `ends.tokens`, which is at `start_pos`."""
    stream, lend, n = work.compute, work.pinned.lend, ends.ahead
    runtime.send(program.step_address, fill_image(program, start_pos, ends.tokens, work), stream)
    (segment,) = program.segments
    for _ in range(n):
        launch(segment, runtime, stream, ranges, ends.first)
    # While the device is at work:
    targets = make_targets(n)
    chosen = lend(4 * n).view(np.int32)
    targets.fetch(0, segment.last, segment.rows, stream, AHEAD_ROWS)
    runtime.fetch(chosen, program.answers, stream)
    runtime.synchronize(stream)
    traffic.synchronizations += 1
    traffic.runs += 1
    tokens = chosen.copy()
    wrong = np.flatnonzero(tokens < 0)
    tokens[wrong[0] if len(wrong) else n :] = -1  # what follows from no number is no token
    targets.done()
    return Answer(None, targets.rows, tokens=tokens)

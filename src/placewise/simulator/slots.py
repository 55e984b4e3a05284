"""Latency where an accelerator runs whole pieces of the graph: the slots of Tarnawski et al. 2020 (arXiv:2006.16423).

The ops of an accelerator are cut into the fewest convex pieces. A piece waits for all its inputs, receives them, runs
its ops, and sends what others read; all of that adds up, and nothing that it makes is there before it ends. The pieces
of one accelerator run one after another. A device with `copies=False` is a pool of CPUs: its ops start when their
inputs are there, any number at once. All transfers go through host memory, so each is paid for by the pieces at its
ends, by their slowest links.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from placewise.errors import InvalidInput
from placewise.graph import Ints
from placewise.problem import Problem
from placewise.simulator.arrays import checked_order
from placewise.simulator.timeline import Floats, Timeline, Transfers

TOO_MANY, CIRCLE = 1, 2  # why a placement cannot run


class SlotArrays(NamedTuple):
    """What the kernel reads, in the order in which it takes it."""

    order: Ints  # [N] a topological order
    seconds: Floats  # [N, D] zero where an op may not run
    tensor_ptr: Ints  # [N + 1]
    tensor: Ints  # [T] by producer
    producer: Ints  # [T]
    consumer_ptr: Ints  # [T + 1]
    consumer: Ints  # [E]
    into: Floats  # [T, D] seconds to receive a tensor; zero for pools
    out: Floats  # [T, D] seconds to send it
    pool: NDArray[np.bool_]  # [D]
    stored: NDArray[np.bool_]  # [N]
    model: Ints  # [N] all zero where only the last end counts


def slot_arrays(problem: Problem) -> SlotArrays:
    """The arrays of a problem, made once."""
    if "slots" not in problem.derived:
        graph, cluster = problem.graph, problem.cluster
        pool = np.array([not device.copies for device in cluster.devices], np.bool_)
        into, out = np.zeros((2, graph.num_tensors, problem.num_devices))
        for a in range(problem.num_devices):
            for b in range(problem.num_devices):
                if a != b:
                    seconds = cluster.latency[a, b] + graph.tensor_bytes * cluster.seconds_per_byte[a, b]
                    np.maximum(into[:, b], seconds, out=into[:, b])
                    np.maximum(out[:, a], seconds, out=out[:, a])
        into[:, pool] = 0.0
        out[:, pool] = 0.0
        problem.derived["slots"] = SlotArrays(
            order=graph.topological_order,
            seconds=np.where(np.isfinite(problem.seconds), problem.seconds, 0.0),
            tensor_ptr=graph.outputs[0],
            tensor=graph.outputs[1],
            producer=graph.tensor_producer,
            consumer_ptr=graph.consumer_ptr,
            consumer=graph.consumers,
            into=into,
            out=out,
            pool=pool,
            stored=graph.is_stored,
            model=graph.model if problem.objective == "completion" else np.zeros_like(graph.model),
        )
    found: SlotArrays = problem.derived["slots"]
    return found


class _Pieces(NamedTuple):
    """The last run in full. A piece has a number on its device; each op of a pool is a piece of its own."""

    piece: NDArray[np.int32]  # [N] -1 for parameters
    start: Floats  # [pieces, at most N]
    finish: Floats
    why: NDArray[np.int32]  # [2] why it cannot run (0 = it can), and the op at which that showed


def measure_slots(problem: Problem, rows: NDArray[np.int32], value: Floats) -> _Pieces:
    """Simulate each row into value [B], infinite where it needs too many slots or its pieces wait for each other."""
    n = problem.num_ops
    last = _Pieces(np.full(n, -1, np.int32), np.zeros(n), np.zeros(n), np.zeros(2, np.int32))
    _run(*slot_arrays(problem), rows, np.int64(problem.execution.slots), value, *last)
    return last


def why_not_in_slots(problem: Problem, row: NDArray[np.int32]) -> str:
    """Why a placement cannot run in slots, in words."""
    why, op = measure_slots(problem, row[None], np.empty(1)).why.tolist()
    device, name = problem.cluster.device_names[row[op]], problem.graph.op_names[op]
    if why == TOO_MANY:
        slots = problem.execution.slots
        allowed = "one piece is" if slots == 1 else f"{slots} pieces are"
        return f"data leaves {device} and comes back for op {name!r} once too often: {allowed} allowed on each device"
    return f"op {name!r} on {device} can never start: pieces wait for each other in a circle"


def simulate_slots(problem: Problem, row: NDArray[np.int32], order: Ints | None, peak: Floats) -> Timeline:
    """The timeline of one placement. Inside a piece, it receives, computes by the plan's order, and sends.

    A transfer is shown from when it leaves its device, for host memory, until its reader has it; where several pieces
    of a device receive the same tensor, the first of them is.
    """
    arrays, value = slot_arrays(problem), np.empty(1)
    last = measure_slots(problem, row[None], value)
    if last.why[0]:
        raise InvalidInput(why_not_in_slots(problem, row))
    sequence = (arrays.order if order is None else checked_order(problem, order)).tolist()
    start, finish = np.zeros(problem.num_ops), np.zeros(problem.num_ops)
    clock, place, piece = last.start.copy(), row.tolist(), last.piece.tolist()
    rows: list[list[float]] = []  # tensor, reader, source, target, start, finish
    leaves: dict[int, list[list[float]]] = {}  # by tensor: those that start once it is sent
    for t, op in enumerate(arrays.producer.tolist()):
        seen = {(piece[op], place[op])}
        for reader in arrays.consumer[arrays.consumer_ptr[t] : arrays.consumer_ptr[t + 1]].tolist():
            end = (-1 if arrays.pool[place[reader]] else piece[reader], place[reader])  # a pool receives once
            if end in seen or piece[reader] == piece[op] or (arrays.stored[op] and place[reader] == place[op]):
                continue
            seen.add(end)
            began = float(clock[piece[reader]])
            if not arrays.pool[place[reader]]:
                clock[piece[reader]] += arrays.into[t, place[reader]]
            if place[op] != place[reader]:
                rows.append([t, reader, place[op], place[reader], began, float(clock[piece[reader]])])
                if not arrays.stored[op] and (arrays.pool[place[reader]] or not arrays.pool[place[op]]):
                    leaves.setdefault(t, []).append(rows[-1])
    for op in sequence:
        if not arrays.stored[op]:
            start[op] = clock[piece[op]]
            finish[op] = clock[piece[op]] = start[op] + arrays.seconds[op, place[op]]
    for t, op in enumerate(arrays.producer.tolist()):
        for moved in leaves.get(t, ()):
            moved[4] = float(clock[piece[op]])
            if arrays.pool[int(moved[3])]:
                moved[5] = moved[4] + float(arrays.out[t, place[op]])
        if not arrays.stored[op] and _is_read_elsewhere(arrays, piece, t):
            clock[piece[op]] += arrays.out[t, place[op]]
    shown: dict[tuple[float, float], list[float]] = {}
    for moved in sorted(rows, key=lambda moved: moved[5]):
        shown.setdefault((moved[0], moved[3]), moved)
    table = np.array(sorted(shown.values(), key=lambda moved: moved[4])).reshape(-1, 6)
    tensor, reader, source, target = table[:, :4].astype(np.int32).T
    transfers = Transfers(tensor, reader, source, target, table[:, 4], table[:, 5])
    return Timeline(problem, row, order, float(value[0]), start, finish, transfers, peak)


def _is_read_elsewhere(arrays: SlotArrays, piece: list[int], t: int) -> bool:
    mine = piece[arrays.producer[t]]
    readers = arrays.consumer[arrays.consumer_ptr[t] : arrays.consumer_ptr[t + 1]].tolist()
    return any(piece[reader] != mine for reader in readers)


@njit(cache=True, nogil=True)
def _run(  # type: ignore[no-untyped-def]
    order, seconds, tensor_ptr, tensor, producer, consumer_ptr, consumer, into, out, pool, stored, model,
    rows, slots, value, piece, start, finish, why,
):  # fmt: skip
    """Simulate each row; the last four are outputs about the last one."""
    num_ops, num_devices = seconds.shape
    num_models = 1
    for op in range(num_ops):
        num_models = max(num_models, model[op] + 1)
    lane = np.empty(num_devices, np.int64)  # of each accelerator
    lanes = 0
    for d in range(num_devices):
        lane[d] = lanes
        lanes += 0 if pool[d] else 1
    # How often data on its way to an op has left each accelerator: the number of its piece, if it runs there.
    enters = np.zeros((num_ops, lanes), np.int32)
    pieces = np.zeros(num_devices + 1, np.int32)  # of each device; then the number of its first
    seen = np.empty(num_ops, np.int32)  # the last tensor that a piece received
    missing = np.empty(num_ops, np.int32)  # inputs of a piece, from other pieces, that are not there yet
    length = np.empty(num_ops)
    first_op, next_op = np.empty(num_ops, np.int32), np.empty(num_ops, np.int32)
    follows = np.empty(num_ops, np.int32)  # the next piece on the same device
    ready = np.empty(num_ops, np.int32)
    ends = np.empty(num_models)

    for b in range(rows.shape[0]):
        why[0] = 0
        value[b] = np.inf

        # Cut: a piece begins anew wherever data comes back to a device.
        for op in range(num_ops):
            for a in range(lanes):
                enters[op, a] = 0
        for d in range(num_devices + 1):
            pieces[d] = 0
        for i in range(num_ops):
            op = order[i]
            here = rows[b, op]
            if stored[op]:
                piece[op] = -1
                continue
            own = -1 if pool[here] else lane[here]
            if own >= 0:
                mine = enters[op, own]
                if mine >= slots:
                    why[0], why[1] = TOO_MANY, op
                    break
                piece[op] = mine
                pieces[here] = max(pieces[here], mine + 1)
            for k in range(tensor_ptr[op], tensor_ptr[op + 1]):
                t = tensor[k]
                for e in range(consumer_ptr[t], consumer_ptr[t + 1]):
                    reader = consumer[e]
                    for a in range(lanes):
                        back = enters[op, a]
                        if a == own and rows[b, reader] != here:
                            back += 1
                        enters[reader, a] = max(enters[reader, a], back)
        if why[0]:
            continue

        # Number the pieces, and list their ops.
        total = 0
        for d in range(num_devices):
            count = pieces[d]
            pieces[d] = total
            for j in range(count):
                missing[total + j] = 1 if j > 0 else 0
                follows[total + j] = total + j + 1 if j + 1 < count else -1
            total += count
        for i in range(num_ops):
            op = order[i]
            if stored[op]:
                continue
            here = rows[b, op]
            if pool[here]:
                piece[op] = total
                missing[total] = 0
                follows[total] = -1
                total += 1
            else:
                piece[op] += pieces[here]
        for p in range(total):
            length[p] = 0.0
            start[p] = 0.0
            first_op[p] = -1
            seen[p] = -1
        for i in range(num_ops):
            op = order[i]
            if piece[op] >= 0:
                length[piece[op]] += seconds[op, rows[b, op]]
                next_op[op] = first_op[piece[op]]
                first_op[piece[op]] = op

        # Charge each transfer to the pieces at its ends. A parameter waits at home and goes without being sent.
        for t in range(len(producer)):
            op = producer[t]
            home, mine = rows[b, op], piece[op]
            leaves = False
            for e in range(consumer_ptr[t], consumer_ptr[t + 1]):
                p, there = piece[consumer[e]], rows[b, consumer[e]]
                if p == mine or (stored[op] and there == home):
                    continue
                leaves = True
                if not stored[op]:
                    missing[p] += 1
                if seen[p] != t:
                    seen[p] = t
                    length[p] += into[t, there]
            if leaves and not stored[op]:
                length[mine] += out[t, home]

        # Run the pieces in the order of the data.
        num_ready, done = 0, 0
        for p in range(total):
            if missing[p] == 0:
                ready[num_ready] = p
                num_ready += 1
        while done < num_ready:
            p = ready[done]
            done += 1
            end = start[p] + length[p]
            finish[p] = end
            after = follows[p]
            if after >= 0:
                start[after] = max(start[after], end)
                missing[after] -= 1
                if missing[after] == 0:
                    ready[num_ready] = after
                    num_ready += 1
            op = first_op[p]
            while op >= 0:
                for k in range(tensor_ptr[op], tensor_ptr[op + 1]):
                    t = tensor[k]
                    for e in range(consumer_ptr[t], consumer_ptr[t + 1]):
                        q = piece[consumer[e]]
                        if q != p:
                            start[q] = max(start[q], end)
                            missing[q] -= 1
                            if missing[q] == 0:
                                ready[num_ready] = q
                                num_ready += 1
                op = next_op[op]
        if done < total:
            for p in range(total - 1, -1, -1):
                if missing[p] > 0:
                    why[0], why[1] = CIRCLE, first_op[p]
            continue

        for m in range(num_models):
            ends[m] = 0.0
        for op in range(num_ops):
            if piece[op] >= 0:
                ends[model[op]] = max(ends[model[op]], finish[piece[op]])
        value[b] = 0.0
        for m in range(num_models):
            value[b] += ends[m]

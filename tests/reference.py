"""The execution model in plain Python: slow, short, and equal to the compiled simulator bit for bit.

Written from docs/execution-model.md with lists and dictionaries, sharing no code with the kernels except the priority
order. Transfers are computed as latency + bytes * seconds_per_byte, in that order of operations.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from placewise.simulator.arrays import priority_order


def run(problem, placement, order=None):
    """(value, start, finish, transfers as (tensor, source, target, start, finish), peak)."""
    graph, cluster, execution = problem.graph, problem.cluster, problem.execution
    place = [int(d) for d in placement]
    sequence = [int(i) for i in (priority_order(problem) if order is None else order)]
    priority = {op: i for i, op in enumerate(sequence)}
    stored = graph.is_stored.tolist()
    outputs = [[] for _ in place]  # tensors of each op, in the graph's order
    for t, op in enumerate(graph.tensor_producer.tolist()):
        outputs[op].append(t)
    readers = [
        sorted(graph.consumers[graph.consumer_ptr[t] : graph.consumer_ptr[t + 1]].tolist(), key=priority.get)
        for t in range(graph.num_tensors)
    ]
    missing = np.bincount(graph.consumers, minlength=len(place)).tolist()
    seconds = [float(problem.seconds[op, d]) for op, d in enumerate(place)]
    free = dict.fromkeys(range(len(cluster.channels)), 0.0)
    start, finish, ready = [0.0] * len(place), [0.0] * len(place), [0.0] * len(place)
    transfers, per_edge = [], execution.sends == "edge"

    def move(t, a, b, now):
        channels = cluster.channels_of[a, b] if execution.contention == "channel" else ()
        begin = max([now, *(free[c] for c in channels)])
        size, per_byte = float(graph.tensor_bytes[t]), float(cluster.seconds_per_byte[a, b])
        arrive = begin + (float(cluster.latency[a, b]) + size * per_byte)
        for c in channels:
            free[c] = arrive
        transfers.append((t, a, b, begin, arrive))
        return arrive

    def book(op, arrive):
        ready[op] = max(ready[op], arrive)
        missing[op] -= 1

    if execution.concurrency == "sequential":
        now, here = 0.0, set()
        for op in sequence:
            if stored[op]:
                continue
            for t in sorted((t for t in range(graph.num_tensors) if op in readers[t]),
                            key=lambda t: (priority[int(graph.tensor_producer[t])], t)):  # fmt: skip
                home = place[graph.tensor_producer[t]]
                if home != place[op] and (per_edge or (t, place[op]) not in here):
                    here.add((t, place[op]))
                    span = float(cluster.latency[home, place[op]]) + float(graph.tensor_bytes[t]) * float(
                        cluster.seconds_per_byte[home, place[op]]
                    )
                    transfers.append((t, home, place[op], now, now + span))
                    now += span
            start[op], finish[op] = now, now + seconds[op]
            now = finish[op]
        return _result(problem, place, start, finish, transfers, per_edge, readers)

    # Streamed parameters: which copies each op fetches (it is the first to need them there), device by device.
    fetches = {op: [] for op in sequence}
    for op in sequence:
        for t in outputs[op] if stored[op] else []:
            sent = set()
            for reader in readers[t]:
                if place[reader] == place[op]:
                    book(reader, 0.0)
                elif per_edge or place[reader] not in sent:
                    sent.add(place[reader])
                    fetches[reader].append(t)
    streamed = [[op for op in sequence if fetches[op] and place[op] == d] for d in range(problem.num_devices)]

    def fetch(op, now):
        for t in fetches[op]:
            arrive = move(t, place[graph.tensor_producer[t]], place[op], now)
            for reader in [op] if per_edge else readers[t]:
                if place[reader] == place[op]:
                    book(reader, arrive)

    for op in sequence:
        if fetches[op] and streamed[place[op]].index(op) < execution.prefetch:
            fetch(op, 0.0)

    waiting = [op for op in sequence if not stored[op]]
    running: dict[int, int] = {}  # device -> op
    now = 0.0
    while waiting or running:
        for op in sorted((op for op in running.values() if finish[op] == now), key=priority.get):
            del running[place[op]]
            for t in outputs[op]:
                sent = {place[op]: now}
                for reader in readers[t]:
                    d = place[reader]
                    if d not in sent or (per_edge and d != place[op]):
                        sent[d] = move(t, place[op], d, now)
                    book(reader, sent[d])
            line = streamed[place[op]]
            if fetches[op] and line.index(op) + execution.prefetch < len(line):
                fetch(line[line.index(op) + execution.prefetch], now)
        for d in range(problem.num_devices):
            mine = [op for op in waiting if place[op] == d]
            able = [op for op in (mine[:1] if order is not None else mine) if missing[op] == 0 and ready[op] <= now]
            if d not in running and able:
                op = able[0]
                waiting.remove(op)
                running[d] = op
                start[op], finish[op] = now, now + seconds[op]
        if any(finish[op] == now for op in running.values()):
            continue  # an op that takes no time has ended already
        coming = [finish[op] for op in running.values()]
        coming += [ready[op] for op in waiting if missing[op] == 0 and ready[op] > now]
        if coming:
            now = min(coming)
    return _result(problem, place, start, finish, transfers, per_edge, readers)


def run_in_slots(problem, placement):
    """(value, why): infinite and why not, where the placement cannot run in slots."""
    graph, execution = problem.graph, problem.execution
    place, stored = [int(d) for d in placement], graph.is_stored.tolist()
    pool = [not device.copies for device in problem.cluster.devices]
    edges = list(zip(graph.edge_tensor.tolist(), graph.edge_producer.tolist(), graph.consumers.tolist(), strict=True))
    inputs = {op: [(t, u) for t, u, v in edges if v == op and not stored[u]] for op in range(len(place))}

    def ways(op, device, outside=False):
        """(ancestor there, whether the data was elsewhere in between), over all ways that do not pass the device."""
        found = set()
        for _, u in inputs[op]:
            found |= {(u, outside)} if place[u] == device else ways(u, device, True)
        return found

    number = {}
    for op in graph.topological_order.tolist():
        if not stored[op] and not pool[place[op]]:
            number[op] = max([number[u] + left for u, left in ways(op, place[op])], default=0)
    if any(j >= execution.slots for j in number.values()):
        return np.inf, "too many"

    piece = {op: (place[op], number[op]) if op in number else op for op in range(len(place)) if not stored[op]}
    length = dict.fromkeys(piece.values(), 0.0)
    for op in graph.topological_order.tolist():
        if op in piece:
            length[piece[op]] += float(problem.seconds[op, place[op]])
    pairs = [(a, b) for a in range(len(pool)) for b in range(len(pool)) if a != b]
    for t, u in enumerate(graph.tensor_producer.tolist()):
        link = {
            (a, b): float(problem.cluster.latency[a, b])
            + float(graph.tensor_bytes[t]) * float(problem.cluster.seconds_per_byte[a, b])
            for a, b in pairs
        }
        readers = [v for s, _, v in edges if s == t]
        if stored[u]:
            ends = [piece[v] for v in readers if place[v] != place[u]]
        else:
            ends = [piece[v] for v in readers if piece[v] != piece[u]]
        for end in dict.fromkeys(ends):
            if isinstance(end, tuple):
                length[end] += max([link[a, b] for a, b in pairs if b == end[0]], default=0.0)
        if ends and not stored[u] and isinstance(piece[u], tuple):
            length[piece[u]] += max([link[a, b] for a, b in pairs if a == place[u]], default=0.0)

    before = {p: {piece[u] for op in piece if piece[op] == p for _, u in inputs[op]} - {p} for p in length}
    for p in length:
        if isinstance(p, tuple) and p[1] > 0:
            before[p].add((p[0], p[1] - 1))
    finish = {}
    while len(finish) < len(length):
        able = [p for p in length if p not in finish and before[p] <= finish.keys()]
        if not able:
            return np.inf, "circle"
        for p in able:
            finish[p] = max([finish[q] for q in before[p]], default=0.0) + length[p]
    models = [0.0] * len(graph.models)
    for op, p in piece.items():
        models[graph.model[op]] = max(models[graph.model[op]], finish[p])
    return (sum(models) if problem.objective == "completion" else max(models, default=0.0)), ""


def _result(problem, place, start, finish, transfers, per_edge, readers):
    graph = problem.graph
    models = [0.0] * len(graph.models)
    for op, end in enumerate(finish):
        models[graph.model[op]] = max(models[graph.model[op]], end)
    value = sum(models) if problem.objective == "completion" else max(models, default=0.0)
    peak = [_peak(graph, d, place, start, finish, transfers, per_edge, readers) for d in range(problem.num_devices)]
    return value, start, finish, transfers, peak


def _peak(graph, d, place, start, finish, transfers, per_edge, readers):
    """Most bytes held at one instant: every holding is an interval [from, to)."""
    resident, held, last = 0.0, [], max(finish, default=0.0)
    for op in range(len(place)):
        if place[op] == d:
            resident += graph.resident[op]
            held.append((start[op], finish[op], graph.scratch[op]))
    for t, op in enumerate(graph.tensor_producer.tolist()):
        size = graph.tensor_bytes[t]
        local = [finish[r] for r in readers[t] if place[r] == d]
        sends = [row[4] for row in transfers if row[0] == t]
        if place[op] == d and graph.is_stored[op]:
            resident += size
        elif place[op] == d:
            held.append((start[op], max(local + sends) if readers[t] else last + 1.0, size))
        elif local and per_edge:
            arriving = [row[3] for row in transfers if row[0] == t and row[2] == d]
            order = [finish[r] for r in readers[t] if place[r] == d]
            held += [(begin, end, size) for begin, end in zip(arriving, order, strict=True)]
        elif local:
            begin = next(row[3] for row in transfers if row[0] == t and row[2] == d)
            held.append((begin, max(local), size))
    moments = sorted({0.0} | {begin for begin, _, _ in held})
    return resident + max(sum(size for a, b, size in held if a <= moment < b) for moment in moments)


# ---- pipelines -------------------------------------------------------------------------------------------------------


def per_sample(problem, placement):
    """(time per sample, peaks by device); tries every number of replicas for every device that has ops.

    Where several numbers are the best, there are as many peaks.
    """
    graph, cluster, execution = problem.graph, problem.cluster, problem.execution
    place, devices = [int(d) for d in placement], range(problem.num_devices)
    trains, apart = any(graph.phase > 0), execution.pipeline == "gpipe"
    compute, copying = [[0.0] * 2 for _ in devices], [[0.0] * 2 for _ in devices]
    passed = {c: [0.0] * 2 for c in range(len(cluster.channels))}
    resident, held, kept, scratch = ([0.0] * len(devices) for _ in range(4))
    for op, d in enumerate(place):
        compute[d][int(graph.phase[op] > 0)] += float(problem.seconds[op, d])
        resident[d] += float(graph.resident[op])
        scratch[d] = max(scratch[d], float(graph.scratch[op]))
    ahead = {d: set() for d in devices}
    for t, op in enumerate(graph.tensor_producer.tolist()):
        home, phase, size = place[op], int(graph.phase[op] > 0), float(graph.tensor_bytes[t])
        readers = graph.consumers[graph.consumer_ptr[t] : graph.consumer_ptr[t + 1]].tolist()
        stored, weight = bool(graph.is_stored[op]), graph.op_kinds[op] == "parameter"
        if stored:
            resident[home] += size
        else:
            held[home] += size if execution.memory == "live" else 0.0
            ahead[home] |= {place[v] for v in readers if phase == 0 and graph.phase[v] == 0} - {home}
        activation = phase == 0 and not stored
        reread = any(graph.phase[v] > 0 for v in readers)
        if activation and reread and not execution.recompute:
            kept[home] += size
        targets = [place[v] for v in readers if place[v] != home]
        times = []
        for d in targets if execution.sends == "edge" else sorted(set(targets)):
            times.append(float(cluster.latency[home, d]) + size * float(cluster.seconds_per_byte[home, d]))
            if weight:  # it stays there, until it changes
                times[-1] = times[-1] / execution.microbatches if trains else 0.0
            held[d] += size if weight or execution.memory == "live" else 0.0
            if activation and (reread or execution.recompute):
                kept[d] += size
            copying[d][phase] += times[-1] * cluster.devices[d].copies
            for c in cluster.channels_of[home, d] if execution.contention == "channel" else ():
                passed[c][phase] += times[-1]
        sent = max(times, default=0.0) if execution.staged else sum(times)
        copying[home][phase] += sent * cluster.devices[home].copies

    in_flight = trains and execution.in_flight == "pipeline"
    if execution.recompute and in_flight:
        for times in compute:
            times[1] += times[0]

    def peaks(count):
        """Bytes by device, if so many have its stage."""
        if execution.memory == "static":
            return [resident[d] + held[d] for d in devices]

        def from_here(d):
            return count[d] + max([from_here(e) for e in ahead[d]], default=0)

        step, found = execution.microbatches, []
        for d in devices:
            samples = 1
            if in_flight and d in count:
                in_all = step if apart else from_here(d) if step == 1 else min(step, from_here(d))
                samples = math.ceil(in_all / count[d])
            found.append(resident[d] + held[d] + scratch[d] + (samples - 1) * kept[d])
        return found

    def load(d, r, phases):
        work, moves = (sum(times[d][p] for p in phases) for times in (compute, copying))
        total = (max(work, moves) if execution.overlap else work + moves) / r
        other = next((e for e in devices if e != d and _alike(problem, d, e)), d)
        if trains and 1 in phases and r > 1:
            ring = 2 * (r - 1) / r * resident[d] * cluster.seconds_per_byte[d, other]
            total += (ring + 2 * (r - 1) * cluster.latency[d, other]) / execution.microbatches
        return total

    used = sorted(set(place))
    kinds = {d: tuple(e for e in devices if e == d or _alike(problem, d, e)) for d in used}
    choices = [range(1, len(kinds[d]) + 1 if execution.replicate else 2) for d in used]
    found = []
    for counts in itertools.product(*choices):
        count = dict(zip(used, counts, strict=True))
        total = {kind: sum(r for d, r in count.items() if kinds[d] == kind) for kind in kinds.values()}
        enough = sum(counts) <= max(len(used), problem.max_devices or len(devices))
        if enough and all(total[kind] <= len(kind) for kind in total):
            value = sum(
                max([0.0, *(load(d, r, phases) for d, r in count.items()),
                     *(sum(times[p] for p in phases) for times in passed.values())])
                for phases in ([[0], [1]] if apart else [[0, 1]])
            )  # fmt: skip
            held_then = peaks(count)
            found.append((value, held_then, all(a <= b for a, b in zip(held_then, problem.capacity, strict=True))))
    fitting = [(value, peak) for value, peak, fits in found if fits or not any(row[2] for row in found)]
    best = min(value for value, _ in fitting)
    return best, [peak for value, peak in fitting if value <= best * (1 + 1e-12)]


def _alike(problem, a, b):
    cluster, renamed = problem.cluster, {a: b, b: a}
    pairs = [(c, d, renamed.get(c, c), renamed.get(d, d)) for c in range(cluster.num_devices)
             for d in range(cluster.num_devices)]  # fmt: skip
    return (
        problem.seconds[:, a].tolist() == problem.seconds[:, b].tolist()
        and problem.capacity[a] == problem.capacity[b]
        and cluster.devices[a].copies == cluster.devices[b].copies
        and all(m[c, d] == m[e, f] for m in (cluster.latency, cluster.seconds_per_byte) for c, d, e, f in pairs)
    )

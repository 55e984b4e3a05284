"""The event loop, compiled: one function that runs placements from time zero, or from a checkpoint, to the end.

How it works. Ops are numbered by priority (arrays.py). When an op finishes, each of its output tensors is sent to each
device that reads it; a transfer takes the first moment at which all its channels are free, so its arrival is known at
once, and a reader can start at `ready[reader]` as soon as its last input is booked. Until its device takes it, the
reader waits in the device's *ready* bitmap (if it will be ready when the device next looks) or in its *pending* queue.
A device has one next event: the end of what it runs, or the arrival of its earliest pending op. Devices and channels
are served in event time; simultaneous completions are processed by priority before any op starts.

How it is written. Numba's disk cache does not notice edits to functions compiled in *other* files, so everything is in
this one. Loops are plain, arrays are flat and passed one by one: code that allocates, or reads arrays out of tuples,
counts references on each access, which `_nrt=False` rules out; and it takes seconds longer to compile. Indices are
unsigned (`U`): signed ones cost a test for negative values each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

if TYPE_CHECKING:
    from placewise.simulator.arrays import Arrays

U = np.uint64
INF = np.inf
ZERO, ONE, TWO, SIX, LOW6 = U(0), U(1), U(2), U(6), U(63)


@njit(cache=True, nogil=True)
def longest_path_to_end(order, weight, transfer, output_ptr, output, consumer_ptr, consumer):
    """[N] weight of the heaviest path that starts at each op, counting op and tensor weights."""
    length = np.zeros(len(weight))
    for i in range(len(order) - 1, -1, -1):
        op = order[i]
        best = 0.0
        for j in range(output_ptr[op], output_ptr[op + 1]):
            tensor = output[j]
            for e in range(consumer_ptr[tensor], consumer_ptr[tensor + 1]):
                best = max(best, transfer[tensor] + length[consumer[e]])
        length[op] = weight[op] + best
    return length


@intrinsic
def _lowest_bit(typing_context, word):
    """Number of trailing zeros of a word that is not zero (one machine instruction)."""

    def emit(context, builder, signature, args):
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), emit


@njit(cache=True, nogil=True, forceinline=True, _nrt=False)
def _insert(keys, values, end, key, value):
    """Into a sorted queue whose infinite last key is at `end`.

    What is booked later mostly arrives later, so that a step or two from the end is enough; a heap costs more.
    """
    keys[end + ONE] = INF
    while keys[end - ONE] > key:
        keys[end] = keys[end - ONE]
        values[end] = values[end - ONE]
        end -= ONE
    keys[end] = key
    values[end] = value


@njit(cache=True, nogil=True, forceinline=True, _nrt=False)
def _first_free(now, link, free, shared, via_ptr, via):
    """When all channels of a link are free. Links that share no channel have one each, numbered like the link."""
    begins = now
    if shared:
        for v in range(U(via_ptr[link]), U(via_ptr[link + ONE])):
            clear = free[U(via[v])]
            begins = clear if clear > begins else begins
    else:
        clear = free[link]
        begins = clear if clear > begins else begins
    return begins


@njit(cache=True, nogil=True, forceinline=True, _nrt=False)
def _occupy(until, link, free, shared, via_ptr, via):
    if shared:
        for v in range(U(via_ptr[link]), U(via_ptr[link + ONE])):
            free[U(via[v])] = until
    else:
        free[link] = until


@njit(cache=True, nogil=True, _nrt=False)
def _peak_memory(
    tensor_ptr, size, consumer_ptr, input_ptr, inputs, producer, resident, scratch, stored, num_devices, per_edge,
    place, start, finish, sends, sent_tensor, sent_reader, sent_start, sent_end, room, peak,
):  # fmt: skip
    """Set peak[d] to the most bytes held at one instant, from the times of a run.

    A holding (a tensor where it is made, scratch space, a received copy) occupies [from, to): at any instant, what ends
    makes room before what begins. Sorting all beginnings and ends would cost more than the run itself. So they are
    added up in buckets of time; the level between buckets is exact, and only buckets that might rise above the highest
    such level are sorted.
    """
    (
        last_read, last_use, opened, closed, begins_in, ends_in, first_event,
        event_time, event_change, event_bucket, sorted_time, sorted_change,
    ) = room  # fmt: skip
    n, num_tensors, nowhere = U(len(place)), U(len(size)), U(len(opened)) - ONE
    buckets = nowhere // num_devices

    # When each tensor is last read on each device, and last sent; stored ones are resident and not counted here.
    for i in range(num_tensors * num_devices):
        last_read[i] = 0.0
    for k in range(num_tensors):
        last_use[k] = 0.0
    end = 0.0
    for i in range(n):
        d = U(place[i])
        done = finish[i]
        end = done if done > end else end
        for j in range(U(input_ptr[i]), U(input_ptr[i + ONE])):
            at = U(inputs[j]) * num_devices + d
            last_read[at] = done if done > last_read[at] else last_read[at]
    for q in range(sends):
        k = U(sent_tensor[q])
        last_use[k] = sent_end[q] if sent_end[q] > last_use[k] else last_use[k]
    for s in range(len(stored)):
        i = U(stored[s])
        for k in range(U(tensor_ptr[i]), U(tensor_ptr[i + ONE])):
            last_use[k] = -1.0

    # Beginnings and ends by buckets. Holdings are numbered: tensors, scratch of ops, transfers.
    scale = np.float64(buckets - ONE) / end if end > 0.0 else 0.0
    for i in range(nowhere + ONE):
        opened[i] = 0.0
        closed[i] = 0.0
    for d in range(num_devices):
        peak[d] = 0.0
    for i in range(n):
        d = U(place[i])
        peak[d] += resident[i]
        first = d * buckets + U(np.int64(start[i] * scale))
        for k in range(U(tensor_ptr[i]), U(tensor_ptr[i + ONE])):
            gone = last_read[k * num_devices + d]
            gone = last_use[k] if last_use[k] > gone else gone
            kept = consumer_ptr[k] == consumer_ptr[k + ONE]  # a result stays to the end
            held = last_use[k] >= 0.0 and (kept or gone > start[i])
            last_use[k] = gone
            begins_in[k] = first if held else nowhere
            ends_in[k] = d * buckets + U(np.int64(gone * scale)) if held and not kept else nowhere
            opened[U(begins_in[k])] += size[k]
            closed[U(ends_in[k])] += size[k]
        h = num_tensors + i
        held = finish[i] > start[i]
        begins_in[h] = first if held else nowhere
        ends_in[h] = d * buckets + U(np.int64(finish[i] * scale)) if held else nowhere
        opened[U(begins_in[h])] += scratch[i]
        closed[U(ends_in[h])] += scratch[i]
    for q in range(sends):
        k = U(sent_tensor[q])
        d = U(place[U(sent_reader[q])])
        gone = finish[U(sent_reader[q])] if per_edge else last_read[k * num_devices + d]
        h = num_tensors + n + q
        held = gone > sent_start[q]
        begins_in[h] = d * buckets + U(np.int64(sent_start[q] * scale)) if held else nowhere
        ends_in[h] = d * buckets + U(np.int64(gone * scale)) if held else nowhere
        opened[U(begins_in[h])] += size[k]
        closed[U(ends_in[h])] += size[k]

    # The level after each bucket. A bucket is in doubt if its beginnings alone would raise the level above all those;
    # it is marked by the level before it.
    for d in range(num_devices):
        level = before = peak[d]
        for i in range(d * buckets, (d + ONE) * buckets):
            level += opened[i] - closed[i]
            peak[d] = level if level > peak[d] else peak[d]
        level = before
        for i in range(d * buckets, (d + ONE) * buckets):
            before = level
            level += opened[i] - closed[i]
            in_doubt = before + opened[i] > peak[d] and closed[i] > 0.0
            opened[i] = (before if before > 0.0 else 0.0) if in_doubt else -1.0  # rounding may leave less than nothing
    opened[nowhere] = -1.0

    # The events of buckets in doubt, sorted by bucket, then by time with ends before beginnings.
    events = ZERO
    for h in range(num_tensors + n + sends):
        begins, ends = opened[U(begins_in[h])] >= 0.0, opened[U(ends_in[h])] >= 0.0
        if not (begins | ends):
            continue
        if h < num_tensors:
            since, until, amount = start[U(producer[h])], last_use[h], size[h]
        elif h < num_tensors + n:
            i = h - num_tensors
            since, until, amount = start[i], finish[i], scratch[i]
        else:
            q = h - num_tensors - n
            k = U(sent_tensor[q])
            reader = U(sent_reader[q])
            until = finish[reader] if per_edge else last_read[k * num_devices + U(place[reader])]
            since, amount = sent_start[q], size[k]
        if begins:
            event_time[events] = since
            event_change[events] = amount
            event_bucket[events] = begins_in[h]
            events += ONE
        if ends:
            event_time[events] = until
            event_change[events] = -amount
            event_bucket[events] = ends_in[h]
            events += ONE
    if events == ZERO:
        return
    for i in range(nowhere + TWO):
        first_event[i] = ZERO
    for j in range(events):
        first_event[U(event_bucket[j]) + TWO] += ONE
    for i in range(nowhere):
        first_event[i + TWO] += first_event[i + ONE]
    for j in range(events):
        i = U(event_bucket[j]) + ONE
        sorted_time[first_event[i]] = event_time[j]
        sorted_change[first_event[i]] = event_change[j]
        first_event[i] += ONE
    for i in range(nowhere):
        level = opened[i]
        if level < 0.0:
            continue
        d = i // buckets
        for j in range(first_event[i], first_event[i + ONE]):
            time, change, at = sorted_time[j], sorted_change[j], j
            while at > first_event[i] and (
                sorted_time[at - ONE] > time or (sorted_time[at - ONE] == time and sorted_change[at - ONE] > change)
            ):
                sorted_time[at] = sorted_time[at - ONE]
                sorted_change[at] = sorted_change[at - ONE]
                at -= ONE
            sorted_time[at] = time
            sorted_change[at] = change
        for j in range(first_event[i], first_event[i + ONE]):
            level += sorted_change[j]
            peak[d] = level if level > peak[d] else peak[d]


@njit(cache=True, nogil=True)
def _save(store, at, values, count):
    for i in range(count):
        store[at + i] = values[i]
    return at + count


@njit(cache=True, nogil=True)
def _load(store, at, values, count):
    for i in range(count):
        values[i] = store[at + i]
    return at + count


def workspace(arrays: Arrays, num_devices: int, num_models: int, track: bool) -> tuple[Any, ...]:
    """Room for `run` to work in, in the order in which it takes it. One thread at a time; reused from row to row.

    (Made here and not in the loop's function because compiled code that allocates counts references on every access.)
    """
    n, d, edges = len(arrays.op), num_devices, len(arrays.consumer)
    words = (n + 63) // 64
    summaries = (words + 63) // 64
    summary = np.zeros((d, summaries + 1), np.uint64)
    summary[:, -1] = 1  # a sentinel, so that a search for a bit always ends
    streams = len(arrays.stored) > 0
    return (
        np.empty(n, np.uint16),  # place
        np.empty(n),  # duration
        np.empty(n, np.int32),  # missing: inputs not yet booked
        np.empty(n),  # ready: when the inputs booked so far are all there
        np.zeros(d * words, np.uint64),  # bits: ready ops of each device
        summary.ravel(),  # which words hold a bit
        # pending ops of each device, a queue sorted by ready time, between keys of -1 and infinity
        np.full(d * (n + 2), -1.0),  # pending_at
        np.empty(d * (n + 2), np.uint32),  # pending_op
        np.empty(d, np.uint64),  # pending_first
        np.empty(d, np.uint64),  # pending_end
        np.empty(d),  # event: next event of each device
        np.empty(d, np.uint64),  # running: what it runs; n = idle
        np.empty(d),  # work_left: time of its ops that have not started
        np.empty(arrays.num_channels),  # free: when each channel is next free
        np.empty(num_models),  # model_end
        np.empty(d),  # arrival: where the current tensor has been sent; -1 = not yet
        np.empty(n + 1, np.uint32),  # newly: ops whose last input has just been booked
        # strict order: each device's ops by number, and the next one to run
        np.zeros(d + 1, np.uint32),  # queue_ptr
        np.empty(n, np.uint32),  # queue
        np.empty(d, np.uint32),  # head
        # streamed parameters: the edges to fetch for each op (a list), the streamed consumers of each device
        np.empty(n if streams else 0, np.int64),  # fetch_first
        np.empty(edges if streams else 0, np.int64),  # fetch_next
        np.zeros(d + 1, np.uint32),  # stream_ptr
        np.empty(n if streams else 0, np.uint32),  # stream
        np.empty(n if streams else 0, np.uint32),  # stream_at
        np.empty(n if streams else 0, np.uint32),  # fetching: ops whose fetch window has just opened
        memory_workspace(n, len(arrays.bytes), edges, d) if track else memory_workspace(0, 0, 0, 0),
    )


def memory_workspace(n: int, num_tensors: int, num_edges: int, num_devices: int) -> tuple[Any, ...]:
    """Room for `_peak_memory`."""
    holdings = n + num_tensors + num_edges
    buckets = num_devices * (n // 4 + 16)
    return (
        np.empty(num_tensors * num_devices),  # last_read
        np.empty(num_tensors),  # last_use
        np.empty(buckets + 1),  # opened
        np.empty(buckets + 1),  # closed
        np.empty(holdings, np.uint32),  # begins_in
        np.empty(holdings, np.uint32),  # ends_in
        np.empty(buckets + 2, np.uint64),  # first_event
        np.empty(2 * holdings),  # event_time
        np.empty(2 * holdings),  # event_change
        np.empty(2 * holdings, np.uint32),  # event_bucket
        np.empty(2 * holdings),  # sorted_time
        np.empty(2 * holdings),  # sorted_change
    )


@njit(cache=True, nogil=True, _nrt=False)
def run(
    # the problem (arrays.Arrays)
    op, seconds, num_inputs, sources, stored, model, tensor_ptr, size, consumer_ptr, consumer, edge_ptr, edge_tensor,
    input_ptr, inputs, producer, resident, scratch, latency, per_byte, via_ptr, via,
    num_devices, num_channels, num_models,
    # room to work in (`workspace`)
    place, duration, missing, ready, bits, summary, pending_at, pending_op, pending_first, pending_end, event, running,
    work_left, free, model_end, arrival, newly, queue_ptr, queue, head,
    fetch_first, fetch_next, stream_ptr, stream, stream_at, fetching, room,
    # the placements, by the graph's op numbers, and how to run them
    rows, strict, per_edge, prefetch,
    # out: the sum over models of their last completion (for one model: the makespan)
    values,
    # out, if it is to `record`: peak memory of each row; times of ops and transfers in the last row
    record, peaks, start, finish, sent_tensor, sent_reader, sent_start, sent_end,
    # partial runs: stop once the value must reach the cutoff; begin at a checkpoint; save checkpoints
    cutoff, tail, tail_from, resume, save_every, save_float, save_int, save_word, sequence,
):  # fmt: skip
    """Run each row of `rows`; returns the number of transfers recorded for the last one.

    A row may resume from checkpoint `resume[b]` (-1: from time zero) if no op that had booked an input or started by
    then is placed differently. `tail[i]` bounds the time from the start of op i to the end from below; it is trusted
    for ops numbered `tail_from[b]` and up. A row whose value must reach the cutoff, by that bound or by the work that
    a device has left, is dropped: its value is infinite. With `save_every` > 0, the
    state is saved whenever that many more ops have completed, and `sequence[i]` counts completions before op i's.
    """
    n, num_tensors = U(len(num_inputs)), U(len(size))
    words = (n + LOW6) >> SIX
    summaries = (words + LOW6) >> SIX
    streams = len(stored) > 0
    shared = len(via_ptr) > 0  # else no two links share a channel
    bounded = cutoff < INF

    sends = ZERO
    for b in range(rows.shape[0]):
        # ---- time zero ---------------------------------------------------------------------------------------------
        row = rows[b]
        for d in range(num_devices):
            event[d] = INF
            running[d] = n
            work_left[d] = 0.0
            pending_first[d] = pending_end[d] = d * (n + TWO) + ONE
            pending_at[pending_end[d]] = INF
        for i in range(n):
            d = U(row[op[i]])
            place[i] = d
            duration[i] = seconds[i * num_devices + d]
        for c in range(num_channels):
            free[c] = 0.0
        for m in range(num_models):
            model_end[m] = 0.0
        sends = ZERO
        completed = ZERO
        num_newly = ZERO
        num_fetching = ZERO
        cut = False
        now = 0.0

        if strict:
            for d in range(num_devices + ONE):
                queue_ptr[d] = 0
            for i in range(n):
                queue_ptr[U(place[i]) + ONE] += np.uint32(1)
            for s in range(len(stored)):  # they take no time and do not run
                queue_ptr[U(place[U(stored[s])]) + ONE] -= np.uint32(1)
            for d in range(num_devices):
                queue_ptr[d + ONE] += queue_ptr[d]
                head[d] = queue_ptr[d]
            s = ZERO
            for i in range(n):
                if s < U(len(stored)) and U(stored[s]) == i:
                    s += ONE
                else:
                    d = U(place[i])
                    queue[U(head[d])] = i
                    head[d] += np.uint32(1)
            for d in range(num_devices):
                head[d] = queue_ptr[d]

        opening = resume[b] < 0  # the first round has no completion, only ops that are ready at once
        if opening:
            for i in range(n):
                missing[i] = num_inputs[i]
                ready[i] = 0.0
            for i in range(len(sources)):
                newly[i] = sources[i]
            num_newly = U(len(sources))
            if bounded:
                for i in range(n):
                    work_left[U(place[i])] += duration[i]
        else:
            r = U(resume[b])
            at = _load(save_float[r], ZERO, ready, n)
            at = _load(save_float[r], at, event, num_devices)
            at = _load(save_float[r], at, free, num_channels)
            at = _load(save_float[r], at, model_end, num_models)
            j = _load(save_int[r], ZERO, missing, n)
            j = _load(save_int[r], j, running, num_devices)
            completed = U(save_int[r, j])
            j += ONE
            for d in range(num_devices):
                pending_end[d] += U(save_int[r, j])
                j += ONE
                for i in range(pending_first[d], pending_end[d]):
                    pending_at[i] = save_float[r, at]
                    pending_op[i] = save_int[r, j]
                    at += ONE
                    j += ONE
                pending_at[pending_end[d]] = INF
            j = _load(save_word[r], ZERO, bits, num_devices * words)
            j = _load(save_word[r], j, summary, num_devices * (summaries + ONE))
            for i in range(n):
                if sequence[i] >= completed:
                    work_left[U(place[i])] += duration[i]
            for d in range(num_devices):
                if running[d] < n:
                    work_left[d] -= duration[running[d]]
                    cut |= event[d] + work_left[d] >= cutoff

        if streams:
            # Parameters are at home from the start. A remote device's copy is fetched for its first op that reads it.
            for i in range(n):
                fetch_first[i] = -1
            for d in range(num_devices + ONE):
                stream_ptr[d] = 0
            # Last to first, since lists grow at the front: an op's fetches are then in the order of their producers.
            for s in range(len(stored) - 1, -1, -1):
                i = U(stored[s])
                if record:
                    start[i] = 0.0
                    finish[i] = 0.0
                for later in range(U(tensor_ptr[i + ONE]) - U(tensor_ptr[i])):
                    k = U(tensor_ptr[i + ONE]) - ONE - later
                    for d in range(num_devices):
                        arrival[d] = -1.0
                    for e in range(U(consumer_ptr[k]), U(consumer_ptr[k + ONE])):
                        reader = U(consumer[e])
                        d = U(place[reader])
                        if d == U(place[i]):
                            missing[reader] -= np.int32(1)
                            if missing[reader] == 0:
                                newly[num_newly] = reader
                                num_newly += ONE
                        elif per_edge or arrival[d] < 0.0:
                            arrival[d] = 0.0
                            stream_ptr[d + ONE] += np.uint32(1 if fetch_first[reader] < 0 else 0)
                            fetch_next[e] = fetch_first[reader]
                            fetch_first[reader] = np.int64(e)
            for d in range(num_devices):
                stream_ptr[d + ONE] += stream_ptr[d]
                head_of_stream = U(stream_ptr[d])
                for i in range(n):
                    if fetch_first[i] >= 0 and U(place[i]) == d:
                        stream[head_of_stream] = i
                        stream_at[i] = head_of_stream
                        head_of_stream += ONE
            for i in range(n):
                if fetch_first[i] >= 0 and U(stream_at[i]) < U(stream_ptr[U(place[i])]) + prefetch:
                    fetching[num_fetching] = i
                    num_fetching += ONE

        # ---- events ------------------------------------------------------------------------------------------------
        a, tie, look = ZERO, False, True
        while not cut:
            if not opening:
                now = event[0]
                a = ZERO
                tie = False
                for d in range(ONE, num_devices):
                    when = event[d]
                    earlier = when < now
                    tie = (when == now) | (tie & (not earlier))
                    a = d if earlier else a
                    now = when if earlier else now
                if now == INF:
                    break
                look = tie

            while True:  # completions at this time, by priority
                done = n
                if tie:  # the one of highest priority
                    for d in range(num_devices):
                        if event[d] == now and running[d] < done:
                            done = running[d]
                            a = d
                elif not opening:
                    done = running[a]

                if done < n:
                    if save_every > ZERO:
                        if completed % save_every == ZERO:
                            r = completed // save_every
                            at = _save(save_float[r], ZERO, ready, n)
                            at = _save(save_float[r], at, event, num_devices)
                            at = _save(save_float[r], at, free, num_channels)
                            at = _save(save_float[r], at, model_end, num_models)
                            j = _save(save_int[r], ZERO, missing, n)
                            j = _save(save_int[r], j, running, num_devices)
                            save_int[r, j] = completed
                            j += ONE
                            for d in range(num_devices):
                                save_int[r, j] = pending_end[d] - pending_first[d]
                                j += ONE
                                for i in range(pending_first[d], pending_end[d]):
                                    save_float[r, at] = pending_at[i]
                                    save_int[r, j] = pending_op[i]
                                    at += ONE
                                    j += ONE
                            j = _save(save_word[r], ZERO, bits, num_devices * words)
                            j = _save(save_word[r], j, summary, num_devices * (summaries + ONE))
                        sequence[done] = completed
                    completed += ONE
                    model_end[U(model[done]) if num_models > 1 else ZERO] = now
                    if record:
                        finish[done] = now
                    sent = num_tensors
                    for e in range(U(edge_ptr[done]), U(edge_ptr[done + ONE])):
                        k = U(edge_tensor[e])
                        if k != sent:
                            sent = k
                            for d in range(num_devices):
                                arrival[d] = -1.0
                            arrival[a] = now
                        reader = U(consumer[e])
                        d = U(place[reader])
                        link = a * num_devices + d
                        there = arrival[d]
                        if there < 0.0 or (per_edge and d != a):
                            begins = _first_free(now, link, free, shared, via_ptr, via)
                            there = begins + (latency[link] + size[k] * per_byte[link])
                            _occupy(there, link, free, shared, via_ptr, via)
                            arrival[d] = there
                            if record:
                                sent_tensor[sends] = k
                                sent_reader[sends] = reader
                                sent_start[sends] = begins
                                sent_end[sends] = there
                                sends += ONE
                        before = ready[reader]
                        ready[reader] = there if there > before else before
                        left = missing[reader] - np.int32(1)
                        missing[reader] = left
                        newly[num_newly] = reader
                        num_newly += ONE if left == 0 else ZERO
                    if streams and fetch_first[done] >= 0:
                        later = U(stream_at[done]) + prefetch
                        if later < U(stream_ptr[a + ONE]):
                            fetching[num_fetching] = stream[later]
                            num_fetching += ONE
                    running[a] = n

                for f in range(num_fetching):
                    i = U(fetching[f])
                    d = U(place[i])
                    edge = fetch_first[i]
                    while edge >= 0:
                        k = U(edge_tensor[U(edge)])
                        home = U(place[U(producer[k])])
                        link = home * num_devices + d
                        begins = _first_free(now, link, free, shared, via_ptr, via)
                        there = begins + (latency[link] + size[k] * per_byte[link])
                        _occupy(there, link, free, shared, via_ptr, via)
                        if record:
                            sent_tensor[sends] = k
                            sent_reader[sends] = i
                            sent_start[sends] = begins
                            sent_end[sends] = there
                            sends += ONE
                        last_edge = U(edge) + ONE if per_edge else U(consumer_ptr[k + ONE])
                        for e in range(U(edge), last_edge):
                            reader = U(consumer[e])
                            if U(place[reader]) == d:
                                before = ready[reader]
                                ready[reader] = there if there > before else before
                                missing[reader] -= np.int32(1)
                                if missing[reader] == 0:
                                    newly[num_newly] = reader
                                    num_newly += ONE
                        edge = fetch_next[U(edge)]
                num_fetching = ZERO

                # Ops that now wait only for time to pass.
                for f in range(num_newly):
                    i = U(newly[f])
                    d = U(place[i])
                    when = ready[i]
                    idle = running[d] == n
                    if bounded:
                        cut |= i >= tail_from[b] and when + tail[i] >= cutoff
                    if strict:
                        first = U(head[d])
                        if idle and first < U(queue_ptr[d + ONE]) and U(queue[first]) == i:
                            event[d] = when if when > now else now
                            look |= when <= now
                    else:
                        if when <= event[d]:
                            if not idle or when <= now:
                                word = i >> SIX
                                bits[d * words + word] |= ONE << (i & LOW6)
                                summary[d * (summaries + ONE) + (word >> SIX)] |= ONE << (word & LOW6)
                                if idle:
                                    event[d] = now
                                    look = True
                                continue
                            event[d] = when
                        _insert(pending_at, pending_op, pending_end[d], when, i)
                        pending_end[d] += ONE
                num_newly = ZERO

                if done == n or not tie:
                    break
            opening = False

            first_device, last_device = (ZERO, num_devices) if look else (a, a + ONE)
            for d in range(first_device, last_device):  # starts
                if running[d] != n or event[d] > now:
                    continue
                chosen = n
                if strict:
                    wake = INF
                    first = U(head[d])
                    if first < U(queue_ptr[d + ONE]):
                        i = U(queue[first])
                        if missing[i] == 0:
                            if ready[i] <= now:
                                chosen = i
                                head[d] += np.uint32(1)
                            else:
                                wake = ready[i]
                else:
                    first = pending_first[d]
                    while pending_at[first] <= now:
                        i = U(pending_op[first])
                        first += ONE
                        word = i >> SIX
                        bits[d * words + word] |= ONE << (i & LOW6)
                        summary[d * (summaries + ONE) + (word >> SIX)] |= ONE << (word & LOW6)
                    pending_first[d] = first
                    wake = pending_at[first]
                    at = d * (summaries + ONE)
                    while summary[at] == ZERO:
                        at += ONE
                    at -= d * (summaries + ONE)
                    if at < summaries:
                        word = (at << SIX) + _lowest_bit(summary[d * (summaries + ONE) + at])
                        pattern = bits[d * words + word]
                        chosen = (word << SIX) + _lowest_bit(pattern)
                        pattern &= pattern - ONE
                        bits[d * words + word] = pattern
                        if pattern == ZERO:
                            summary[d * (summaries + ONE) + at] &= summary[d * (summaries + ONE) + at] - ONE
                if chosen == n:
                    event[d] = wake
                    continue
                running[d] = chosen
                event[d] = now + duration[chosen]
                if record:
                    start[chosen] = now
                if bounded:
                    cut |= now + work_left[d] >= cutoff
                    work_left[d] -= duration[chosen]

        # ---- the end -----------------------------------------------------------------------------------------------
        total = 0.0
        for m in range(num_models):
            total += model_end[m]
        values[b] = total
        if record:
            _peak_memory(
                tensor_ptr, size, consumer_ptr, input_ptr, inputs, producer, resident, scratch, stored, num_devices,
                per_edge, place, start, finish, sends, sent_tensor, sent_reader, sent_start, sent_end, room, peaks[b],
            )  # fmt: skip
        if cut:
            values[b] = INF
            for i in range(num_devices * words):
                bits[i] = ZERO
            for d in range(num_devices):
                for i in range(summaries):
                    summary[d * (summaries + ONE) + i] = ZERO
    return sends


@njit(cache=True, nogil=True)
def tails(op, seconds, tensor_ptr, size, consumer_ptr, consumer, latency, per_byte, num_devices, row):
    """[N] time from the start of each op to the end if nothing ever waited for a device or a channel."""
    length = np.zeros(len(op))
    for i in range(len(op) - 1, -1, -1):
        a = U(row[op[i]])
        longest = 0.0
        for k in range(tensor_ptr[i], tensor_ptr[i + 1]):
            for e in range(consumer_ptr[k], consumer_ptr[k + 1]):
                link = a * num_devices + U(row[op[consumer[e]]])
                longest = max(longest, latency[link] + size[k] * per_byte[link] + length[consumer[e]])
        length[i] = seconds[U(i) * num_devices + a] + longest
    return length


@njit(cache=True, nogil=True)
def renumber(order, output_ptr, outputs, consumer_ptr, input_ptr, inputs):
    """The graph's lists when ops are numbered by their place in `order` and tensors by their producers'.

    Consumers of a tensor and inputs of an op then come in the order of their new numbers.
    """
    n, num_tensors, num_edges = len(order), len(outputs), len(inputs)
    new_output_ptr, new_input_ptr = np.zeros(n + 1, np.uint32), np.zeros(n + 1, np.uint32)
    tensor, producer = np.empty(num_tensors, np.uint32), np.empty(num_tensors, np.uint32)
    new_consumer_ptr, new_tensor = np.zeros(num_tensors + 1, np.uint32), np.empty(num_tensors, np.uint32)
    consumer, edge_tensor = np.empty(num_edges, np.uint32), np.empty(num_edges, np.uint32)
    new_inputs, filled = np.empty(num_edges, np.uint32), np.zeros(max(n, num_tensors), np.int64)
    k = 0
    for i in range(n):
        op = order[i]
        for j in range(output_ptr[op], output_ptr[op + 1]):
            t = outputs[j]
            tensor[k], producer[k], new_tensor[t] = t, i, k
            new_consumer_ptr[k + 1] = new_consumer_ptr[k] + np.uint32(consumer_ptr[t + 1] - consumer_ptr[t])
            k += 1
        new_output_ptr[i + 1] = k
        new_input_ptr[i + 1] = new_input_ptr[i] + np.uint32(input_ptr[op + 1] - input_ptr[op])
    for i in range(n):
        op = order[i]
        for j in range(input_ptr[op], input_ptr[op + 1]):
            k = new_tensor[inputs[j]]
            consumer[new_consumer_ptr[k] + filled[k]] = i
            filled[k] += 1
    for i in range(n):
        filled[i] = 0
    for k in range(num_tensors):
        for e in range(new_consumer_ptr[k], new_consumer_ptr[k + 1]):
            i = consumer[e]
            edge_tensor[e] = k
            new_inputs[new_input_ptr[i] + filled[i]] = k
            filled[i] += 1
    return new_output_ptr, tensor, producer, new_consumer_ptr, consumer, edge_tensor, new_input_ptr, new_inputs


@njit(cache=True, nogil=True)
def where_to_resume(rows, current, number, input_ptr, inputs, producer, sequence, spacing, resume, first):
    """For each row, the last checkpoint of the current placement at which no op that the row changes had an input
    booked (-1: none; always if the spacing is 0), and the number after the last of these ops.

    Checkpoints are `spacing` completions apart; `sequence` [N] is how many were before each op's.
    """
    for b in range(len(rows)):
        earliest, last = len(current), -1
        for i in range(len(current)):
            if rows[b, i] != current[i]:
                changed = number[i]
                last = max(last, changed)
                if input_ptr[changed] == input_ptr[changed + 1]:
                    earliest = -1
                for j in range(input_ptr[changed], input_ptr[changed + 1]):
                    earliest = min(earliest, np.int64(sequence[producer[inputs[j]]]))
        first[b] = last + 1
        resume[b] = earliest // spacing if spacing > 0 and last >= 0 and earliest >= 0 else -1


@njit(cache=True, nogil=True)
def run_sequential(
    op, seconds, stored, model, tensor_ptr, size, consumer_ptr, consumer, input_ptr, inputs, producer, resident,
    scratch, latency, per_byte, num_devices, num_models, room, rows, per_edge, values, peaks,
    start, finish, sent_tensor, sent_reader, sent_start, sent_end,
):  # fmt: skip
    """One op or transfer at a time over the whole cluster: ops by priority, each after the inputs that it lacks.

    Arguments and results as for `run`; times are always recorded.
    """
    n, num_tensors = U(len(op)), U(len(size))
    place = np.empty(n, np.uint16)
    is_stored = np.zeros(n, np.bool_)
    here = np.empty(num_tensors * num_devices, np.bool_)  # whether a device has a copy of a tensor
    model_end = np.empty(num_models)
    for s in range(len(stored)):
        is_stored[U(stored[s])] = True

    sends = ZERO
    for b in range(rows.shape[0]):
        for i in range(n):
            place[i] = rows[b, op[i]]
        for m in range(num_models):
            model_end[m] = 0.0
        for j in range(len(here)):
            here[j] = False
        sends = ZERO
        now = 0.0
        for i in range(n):
            if is_stored[i]:
                start[i] = 0.0
                finish[i] = 0.0
                continue
            d = U(place[i])
            for j in range(U(input_ptr[i]), U(input_ptr[i + ONE])):
                k = U(inputs[j])
                home = U(place[U(producer[k])])
                if home == d or (here[k * num_devices + d] and not per_edge):
                    continue
                here[k * num_devices + d] = True
                link = home * num_devices + d
                sent_tensor[sends] = k
                sent_reader[sends] = i
                sent_start[sends] = now
                now = now + (latency[link] + size[k] * per_byte[link])
                sent_end[sends] = now
                sends += ONE
            start[i] = now
            now = now + seconds[i * num_devices + d]
            finish[i] = now
            model_end[U(model[i]) if num_models > 1 else ZERO] = now
        total = 0.0
        for m in range(num_models):
            total += model_end[m]
        values[b] = total
        _peak_memory(
            tensor_ptr, size, consumer_ptr, input_ptr, inputs, producer, resident, scratch, stored, num_devices,
            per_edge, place, start, finish, sends, sent_tensor, sent_reader, sent_start, sent_end, room, peaks[b],
        )  # fmt: skip
    return sends

"""Devices that can change places and nothing changes."""

from __future__ import annotations

import numpy as np

from placewise.problem import Problem


def alike(problem: Problem, a: int, b: int) -> bool:
    """Whether two devices can change places and nothing changes."""
    cluster = problem.cluster
    swapped = np.arange(problem.num_devices)
    swapped[[a, b]] = b, a
    return (
        np.array_equal(problem.seconds[:, a], problem.seconds[:, b])
        and problem.capacity[a] == problem.capacity[b]
        and cluster.devices[a].copies == cluster.devices[b].copies
        and all(np.array_equal(x, x[np.ix_(swapped, swapped)]) for x in (cluster.latency, cluster.seconds_per_byte))
    )


def kinds(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """The devices that can run anything, those that are alike together; made once."""
    if "kinds" not in problem.derived:
        groups: list[list[int]] = []
        for d in np.flatnonzero(problem.allowed.any(axis=0)).tolist():
            mine = next((group for group in groups if alike(problem, group[0], d)), None)
            if mine is None:
                groups.append([d])
            else:
                mine.append(d)
        problem.derived["kinds"] = tuple(map(tuple, groups))
    found: tuple[tuple[int, ...], ...] = problem.derived["kinds"]
    return found


def most_replicas(problem: Problem) -> list[int]:
    """For each kind, how many of its devices may do the same work."""
    most = (problem.max_devices or problem.num_devices) if problem.execution.replicate else 1
    return [min(most, len(devices)) for devices in kinds(problem)]

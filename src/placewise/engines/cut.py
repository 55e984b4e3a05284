"""What crosses between devices in a plan: the fewer, the smaller and the plainer, the better an engine takes it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from placewise.plans import Plan
from placewise.quantities import format_bytes


@dataclass(frozen=True)
class Cut:
    """The tensors that some op reads on another device than the one that made them."""

    tensors: int
    copies: int  # one for each other device that reads one
    bytes: float  # of all copies
    dtypes: tuple[str, ...]
    views: tuple[str, ...]  # ops that make views: what they hand over may not be contiguous


def cut(plan: Plan) -> Cut:
    """Find them."""
    graph, place = plan.problem.graph, plan.placement
    crosses = np.flatnonzero(place[graph.edge_producer] != place[graph.consumers])
    tensor = graph.edge_tensor[crosses].astype(np.int64)
    copies = np.unique(np.stack([tensor, place[graph.consumers[crosses]].astype(np.int64)]), axis=1)[0]
    tensors = np.unique(tensor)
    makers = np.unique(graph.tensor_producer[tensors]).tolist()
    kinds = Counter(graph.op_dtypes[op] for op in makers)
    views = tuple(graph.op_names[op] for op in makers if graph.op_kinds[op] == "view")
    return Cut(len(tensors), len(copies), float(graph.tensor_bytes[copies].sum()), tuple(sorted(kinds)), views)


def describe_cut(plan: Plan) -> str:
    """A line for people, and one more where something may need care."""
    found = cut(plan)
    if not found.tensors:
        return "nothing crosses between devices"
    size, dtypes = format_bytes(found.bytes), ", ".join(found.dtypes)
    tensors = "1 tensor crosses" if found.tensors == 1 else f"{found.tensors} tensors cross"
    copies = "1 copy" if found.copies == 1 else f"{found.copies} copies"
    text = f"{tensors} in {copies}, {size}: {dtypes}"
    if found.views:
        shown = ", ".join(f"{name:.60}" for name in found.views[:3])
        more = f" and {len(found.views) - 3} more" if len(found.views) > 3 else ""
        text += f"\nwarning: views cross, which may not be contiguous: {shown}{more}"
    return text

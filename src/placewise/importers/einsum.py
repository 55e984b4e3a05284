"""How much an Einstein summation multiplies, which every framework writes alike: "ij,jk->ik"."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from placewise.errors import InvalidInput


def einsum(equation: str, shapes: Sequence[tuple[int, ...]]) -> dict[str, Any] | None:
    """The attributes of an einsum of two factors as a product: its inner size is that of the axes that the result
    lacks. None if there are more factors, or fewer.

    Without an arrow, the result has the axes that occur once. What "..." stands for is aligned at its end.
    """
    given, arrow, result = equation.replace(" ", "").partition("->")
    terms = given.split(",")
    if len(terms) != 2 or len(shapes) != 2:
        return None
    if not arrow:
        result = "..." + "".join(letter for letter in given if given.count(letter) == 1)
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, shapes, strict=True):
        front, dots, back = term.partition("...")
        unnamed = len(shape) - len(front) - len(back)
        if unnamed < 0 or (unnamed and not dots):
            raise InvalidInput(f"{equation!r:.60} does not fit its inputs")
        axes = [*front, *(f"...{i}" for i in range(unnamed, 0, -1)), *back]
        for axis, size in zip(axes, shape, strict=True):
            sizes[axis] = max(size, sizes.get(axis, 0))  # one of them may be 1, and is repeated
    return {"equation": equation, "k": math.prod(size for axis, size in sizes.items() if axis[:3] not in result)}

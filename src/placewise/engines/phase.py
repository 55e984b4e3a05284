"""What a language model's graph is of: so many sequences, so many tokens of each, after so many that are cached."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

from placewise.graph import Graph

#: Ids [sequences, tokens] that are looked up.
_READ: Final = re.compile(r"embedding\(\w+\[\d+,\d+\], int\d+\[(\d{1,12}),(\d{1,12})\]")
#: A cache [sequences, heads, tokens, width] and what is added to it.
_GROWN: Final = re.compile(r"concat\(\w+\[(\d+),(\d+),(\d{1,12}),(\d+)\], .*? -> \w+\[\1,\2,(\d{1,12}),\4\]")


class Phase(NamedTuple):
    """One run of the model."""

    sequences: int
    tokens: int  # of each, that it reads
    cached: int  # of each, that were read before


def phase(graph: Graph) -> Phase | None:
    """As the signatures of ops tell, if they do."""
    read = next((found for found in map(_READ.search, graph.op_signatures) if found), None)
    grown = [(int(found[3]), int(found[5])) for found in map(_GROWN.search, graph.op_signatures) if found]
    if read is None:
        return None
    sequences, tokens = int(read[1]), int(read[2])
    return Phase(sequences, tokens, max((before for before, after in grown if after == before + tokens), default=0))


def telling(signatures: Iterable[str]) -> list[str]:
    """Those by which a phase is known, once each."""
    return list(dict.fromkeys(text for text in signatures if _READ.search(text) or _GROWN.search(text)))

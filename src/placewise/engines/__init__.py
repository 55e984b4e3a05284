"""Engines that run a plan: what each can be told, how it executes, and the text that tells it.

Each file of this folder is one engine. Its `fit` turns a problem into what the engine can be told: which ops share a
device, and how it executes them. Its `export` writes a plan of such a problem in the engine's own words.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from placewise.errors import InvalidInput
from placewise.plans import Plan
from placewise.problem import Problem


class Engine(NamedTuple):
    """One engine."""

    name: str
    summary: str  # what `export` writes
    export: Callable[[Plan], str]
    fit: Callable[[Problem], Problem]


_registered: dict[str, Engine] = {}


def engine(name: str, *, fit: Callable[[Problem], Problem]) -> Callable[[Callable[[Plan], str]], Callable[[Plan], str]]:
    """Register the function that writes a plan for an engine; the first line of its docstring says what it writes."""

    def register(export: Callable[[Plan], str]) -> Callable[[Plan], str]:
        _registered[name] = Engine(name, (export.__doc__ or "").partition("\n")[0], export, fit)
        return export

    return register


@cache
def available() -> dict[str, Engine]:
    """Every engine by name."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return dict(sorted(_registered.items()))


def get(name: str) -> Engine:
    """The engine with this name."""
    known = available()
    if name not in known:
        raise InvalidInput(f"there is no engine {name!r:.60}; there are {', '.join(known)}")
    return known[name]

"""The register of planners. A planner is a function in a file of this folder (or of another package that names the
entry point group `placewise.planners`), decorated with `@planner`; importing the file registers it.
"""

from __future__ import annotations

import importlib
import inspect
import math
import pkgutil
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any, TypeVar

from placewise.errors import InvalidInput
from placewise.problem import OBJECTIVES, Problem
from placewise.terminal import say

Function = TypeVar("Function", bound=Callable[..., Any])
_registered: dict[str, PlannerInfo] = {}


@dataclass(frozen=True)
class PlannerInfo:
    """What is known of a registered planner."""

    name: str
    function: Callable[..., Any]
    objectives: frozenset[str]
    supports: Callable[[Problem], bool | str] | None
    options: dict[str, tuple[Any, Any]]  # name -> (type, default)
    compile: Callable[[Problem], object] | None = None  # what to do once before the clock starts

    @property
    def summary(self) -> str:
        """The first line of the docstring."""
        return (inspect.getdoc(self.function) or "").split("\n")[0]

    def why_not(self, problem: Problem) -> str | None:
        """Why the planner does not apply to a problem; None if it does."""
        if problem.objective not in self.objectives:
            return f"plans for {' and '.join(sorted(self.objectives))}, not {problem.objective}"
        verdict = self.supports(problem) if self.supports else True
        return None if verdict is True else verdict or "does not apply to this problem"

    def settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """All options of the planner: those that are given, checked, and the defaults of the others."""
        for key, value in given.items():
            if key not in self.options:
                raise InvalidInput(
                    f"planner {self.name!r} has no option {key!r}; it has {', '.join(self.options) or 'none'}"
                )
            kind, default = self.options[key]
            if not (value is None and default is None):
                _check(value, kind, f"option {key} of {self.name}")
        return {name: default for name, (_, default) in self.options.items()} | dict(given)


def planner(
    name: str,
    *,
    objectives: Iterable[str] = OBJECTIVES,
    supports: Callable[[Problem], bool | str] | None = None,
    compile: Callable[[Problem], object] | None = None,
) -> Callable[[Function], Function]:
    """Register a function `(problem, ctx, *, options...) -> placement | (placement, order) | None`.

    `supports(problem)` returns True, or a few words on why the method does not apply. Keyword-only parameters are the
    method's options (a number is zero or more; what else is wrong with one, the method says by InvalidInput). The first
    line of the docstring is its help text. Returning None means "the best I evaluated".
    `compile(small)` compiles the method's own kernels on a problem of two ops, once, before the clock starts.
    """

    def register(function: Function) -> Function:
        if name in _registered and _registered[name].function.__module__ != function.__module__:
            raise InvalidInput(f"two planners are named {name!r}: {_registered[name].function.__module__} has one too")
        if unknown := set(objectives) - set(OBJECTIVES):
            raise InvalidInput(f"planner {name!r}: {min(unknown)!r} is none of {', '.join(OBJECTIVES)}")
        if not inspect.getdoc(function):
            raise InvalidInput(f"planner {name!r} needs a docstring: its first line is what people read about it")
        hints = typing.get_type_hints(function)
        options = {}
        for parameter in list(inspect.signature(function).parameters.values())[2:]:
            if parameter.kind is not parameter.KEYWORD_ONLY or parameter.default is parameter.empty:
                raise InvalidInput(
                    f"planner {name!r}: write its option {parameter.name!r} after a *, with a default: "
                    f"(problem, ctx, *, {parameter.name}: int = 8)"
                )
            kind, default = _without_none(hints.get(parameter.name, str)), parameter.default
            if kind not in (int, float, bool, str) and typing.get_origin(kind) is not typing.Literal:
                raise InvalidInput(
                    f"planner {name!r}: its option {parameter.name!r} must be an int, float, bool, str or Literal"
                )
            if default is not None:
                _check(default, kind, f"planner {name!r}: the default of {parameter.name}")
            options[parameter.name] = (kind, default)
        _registered[name] = PlannerInfo(name, function, frozenset(objectives), supports, options, compile)
        return function

    return register


@cache
def _import_all() -> None:
    """A file that cannot be imported is left out, and said so; the others still work."""
    importlib.import_module("placewise.driver")  # every planner needs it: what is wrong with it is no planner's fault
    files = [f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__)]
    for module in [*files, *(entry.module for entry in entry_points(group="placewise.planners"))]:
        try:
            importlib.import_module(module)
        except Exception as error:
            say(f"warning: the planners in {module} are left out: {error!r}")


def available() -> dict[str, PlannerInfo]:
    """Every planner by name."""
    _import_all()
    return dict(sorted(_registered.items()))


def get(name: str) -> PlannerInfo:
    """The planner with this name."""
    known = available()
    if not isinstance(name, str) or name not in known:
        raise InvalidInput(f"there is no planner {name!r}; there are {', '.join(known)}")
    return known[name]


def parse_options(name: str, texts: Iterable[str]) -> dict[str, Any]:
    """Read `key=value` texts into a planner's options, with their types."""
    info = get(name)
    parsed: dict[str, Any] = {}
    for text in texts:
        key, given, value = text.partition("=")
        if not given:
            raise InvalidInput(f"option {text!r} is not of the form key=value")
        if key in parsed:
            raise InvalidInput(f"option {key} of {name} is given twice: {parsed[key]} and {value}")
        kind, _ = info.options.get(key, (str, None))
        parsed[key] = parse_value(value, kind, f"option {key} of {name}")
    info.settings(parsed)
    return parsed


def _without_none(kind: Any) -> Any:
    """The T of `T | None`: what is given on the command line is never None."""
    choices = [choice for choice in typing.get_args(kind) if choice is not type(None)]
    return choices[0] if type(None) in typing.get_args(kind) else kind


def parse_value(text: str, kind: Any, where: str) -> Any:
    """Read a text as a value of a type; `where` names it if it cannot be."""
    if kind is bool:
        if text.lower() in ("true", "yes", "1", "false", "no", "0"):
            return text.lower() in ("true", "yes", "1")
        raise InvalidInput(f"{where} = {text!r}: it must be true or false")
    if kind not in (int, float):
        return text
    try:
        return kind(text)
    except ValueError:
        raise InvalidInput(f"{where} = {text!r}: it must be of type {kind.__name__}") from None


def _check(value: Any, kind: Any, where: str) -> None:
    """Refuse what is not of the option's type. No option counts or scales by less than nothing."""
    if typing.get_origin(kind) is typing.Literal:
        choices = typing.get_args(kind)
        if value not in choices:
            raise InvalidInput(f"{where} = {value!r}: it must be one of {', '.join(map(str, choices))}")
        return
    fitting = (int, float) if kind is float else kind
    if not isinstance(value, fitting) or (isinstance(value, bool) and kind is not bool):
        raise InvalidInput(f"{where} = {value!r}: it must be of type {kind.__name__}")
    if kind in (int, float) and not 0 <= value < math.inf:
        raise InvalidInput(f"{where} = {value!r}: it must be a number, zero or more")

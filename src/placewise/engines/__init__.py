"""Engines that run a plan: what each can be told, how it executes, and the text that tells it.

Each file of this folder is one engine. Its `fit` turns a problem into what the engine can be told: which ops share a
device, and how it executes them. Its `export` writes a plan of such a problem in the engine's own words. Its `run`,
where the engine can be run from here, makes a model ready to run as a plan says, for `placewise verify`. Its `write`,
where the engine needs the model cut up, writes that to a folder.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache, wraps
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from numpy.typing import ArrayLike

from placewise.errors import InvalidInput, Unsupported
from placewise.plans import Plan
from placewise.problem import Problem

if TYPE_CHECKING:
    from placewise.measure import Timing

T = TypeVar("T")


class Counted(float):
    """Bytes that were added up, where nobody tells what is held: of weights, and of tensors that are yet to be read."""


class Run(ABC):
    """A model in an engine, with inputs: as the plan places it, and as it runs without a plan.

    What an engine does not tell stays as it is here.
    """

    library: str  # with its version

    @property
    def given(self) -> str:
        """The weights and inputs that it is run with."""
        return ""

    @abstractmethod
    def plain(self) -> Sequence[ArrayLike]:
        """Run the model once as if there were no plan; its outputs, which NumPy can read.

        They may still be on a device: how long they take from there is no part of what is measured.
        """

    @abstractmethod
    def placed(self) -> Sequence[ArrayLike]:
        """Run it once as the plan says; its outputs, in the same order."""

    def clocked(self) -> None:  # noqa: B027 - most have no such clock
        """Run it as the plan says, with a clock at each op, for what `busy` and `times` tell."""

    @abstractmethod
    def ran_on(self) -> Mapping[str, str]:
        """Op to device of the cluster, as the engine itself tells it; ops that it does not tell of are left out."""

    def busy(self) -> Mapping[str, float]:
        """Seconds that each device of the cluster computed for in one placed run, as far as the engine can tell."""
        return {}

    def peak(self) -> Mapping[str, float]:
        """Bytes that each device of the cluster held at most, as far as the engine can tell, or `Counted`."""
        return {}

    def links(self) -> Mapping[tuple[str, str], bool]:
        """Whether bytes arrive unchanged, for each (from, to) that the plan sends over and the engine can test."""
        return {}

    def times(self) -> Iterable[tuple[str, str, Timing]]:
        """(device of the cluster, signature, time) of ops as they ran, placed: for profiles of those devices.

        A device of the same hardware as the one that ran an op may have its time, too.
        """
        return ()


#: Writes a model (of the zoo, or a file that the engine reads), cut up as a plan says, to a folder.
Writer = Callable[[Plan, str, Path], None]
#: Makes a model (of the zoo, or a file that the engine reads) ready to run as a plan says; `devices` tells what the
#: cluster's devices are to the engine, where that does not go without saying. It refuses another model than the plan's
#: first, and then devices that are not there.
Runner = Callable[[Plan, str, Mapping[str, str]], AbstractContextManager[Run]]


class Engine(NamedTuple):
    """One engine."""

    name: str
    summary: str  # what `export` writes
    export: Callable[[Plan], str]
    fit: Callable[[Problem], Problem]
    run: Runner | None = None
    write: Writer | None = None
    places_parameters: bool = False  # whether weights may be elsewhere than the ops that read them
    shards: bool = False  # whether a device may be several, each with a part of every op
    versions: str = ""  # that it is written for, as pip says it (vllm>=0.5.4) where there is a package


_registered: dict[str, Engine] = {}


def engine(
    name: str,
    *,
    fit: Callable[[Problem], Problem],
    versions: str,
    run: Runner | None = None,
    write: Writer | None = None,
    places_parameters: bool = False,
    shards: bool = False,
) -> Callable[[Callable[[Plan], str]], Callable[[Plan], str]]:
    """Register the function that writes a plan for an engine; the first line of its docstring says what it writes.

    With `shards`, it can be told of devices that are several, each with a part of every op.
    """

    def register(export: Callable[[Plan], str]) -> Callable[[Plan], str]:
        summary = (export.__doc__ or "").partition("\n")[0]
        _registered[name] = Engine(
            name, summary, checked(export), fit, run and checked(run), write and checked(write), places_parameters,
            shards, versions,
        )  # fmt: skip
        return export

    def checked(task: Callable[..., T]) -> Callable[..., T]:
        @wraps(task)
        def work(plan: Plan, *rest: Any) -> T:
            if not shards:
                check_whole_ops(plan, name)
            return task(plan, *rest)

        return work

    return register


def check_whole_ops(plan: Plan, engine: str) -> None:
    """Refuse a plan in which several devices have a part of every op (`placewise.sharding`)."""
    for d in sorted(set(plan.placement.tolist())):
        device = plan.problem.cluster.devices[d]
        if device.shards > 1:
            able = ", ".join(name for name, other in available().items() if other.shards)
            raise Unsupported(
                f"each op on {device.name} is cut up among {device.shards} devices, of which {engine} cannot be told "
                f"(only {able}): plan without --shards"
            )


def written_for(found: Engine) -> str:
    """The versions that an engine's output is for, and the one that is installed here, if it is older."""
    package, _, since = found.versions.partition(">=")
    try:
        here = version(package) if since else ""
    except PackageNotFoundError:
        here = ""
    old = here and _numbers(here) < _numbers(since)
    return f"for {found.versions}" + (f"; {here} is installed here, which may not read it" if old else "")


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text.partition("+")[0])]


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


# ---- shared by what runs plans ---------------------------------------------------------------------------------------


def check_devices(plan: Plan, devices: Mapping[str, str]) -> None:
    """Refuse names that the plan's cluster does not have."""
    known = plan.problem.cluster.device_names
    for unknown in devices.keys() - set(known):
        raise InvalidInput(f"devices: there is no device {unknown!r:.60}; there are {', '.join(known)}")


def along(reads: Sequence[Sequence[int]], known: Mapping[int, T]) -> list[T]:
    """A device for every node of a program, given those of some; `reads` has the nodes whose values each reads.

    Others go with what they read, and what comes from constants alone goes with its first reader.
    """
    found = dict(known)
    for node, sources in enumerate(reads):
        home = next((found[source] for source in sources if source in found), None)
        if node not in found and home is not None:
            found[node] = home
    settled = set(found)
    for node in reversed(range(len(reads))):
        for source in reads[node]:
            if node in found and source not in settled:
                found[source] = found[node]  # the first reader is the last to say so
    usual = next(iter(known.values()))
    return [found.get(node, usual) for node in range(len(reads))]

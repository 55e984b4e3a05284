"""Everything that Placewise raises on purpose. Each class carries the exit code that the command line uses."""

from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final


class PlacewiseError(Exception):
    """Base class: the message says what is wrong, where, and what to do."""

    exit_code = 1


class InvalidInput(PlacewiseError):
    """A file, graph, cluster, cost table, plan or option is wrong."""

    exit_code = 2


class NoFeasiblePlan(PlacewiseError):
    """No plan was found that keeps every constraint."""

    exit_code = 3

    def __init__(self, message: str, lower_bound: float = 0.0) -> None:
        super().__init__(message)
        self.lower_bound = lower_bound  # infinite where it is proved that there is none


class Unsupported(PlacewiseError):
    """The request is well formed, but this planner or installation cannot serve it."""

    exit_code = 4


class DoesNotHold(PlacewiseError):
    """A plan was run, and did not do what it promised."""

    exit_code = 5


#: Characters of a name, or of a signature, which describes every input. A small compressed file can hold one of half a
#: gigabyte, which is then copied about.
MAX_TEXT: Final = 100_000


def check_text(value: Any, where: str) -> None:
    """Names must be text, and such text as a file can hold."""
    if not isinstance(value, str):
        raise InvalidInput(f"{where}: must be text, found {value!r:.60}")
    if len(value) > MAX_TEXT:
        raise InvalidInput(f"{where}: must have at most {MAX_TEXT} characters, found {len(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidInput(f"{where}: {value!r:.60} holds half a character and cannot be saved; rename it") from None


def check_type(value: Any, kind: type, where: str) -> None:
    """Told at the door, where the mistake is, and not by whatever trips over it later."""
    if not isinstance(value, kind):
        raise InvalidInput(f"{where}: must be a {kind.__name__}, found {value!r:.60}")


def check_length(values: Sized, expected: int, where: str) -> None:
    """Lists that stand side by side are equally long."""
    if len(values) != expected:
        raise InvalidInput(f"{where}: must have {expected} entries, found {len(values)}")


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Every error about a file begins with its name."""
    try:
        yield
    except (InvalidInput, Unsupported) as error:
        raise type(error)(f"{path}: {error}") from None
    except UnicodeDecodeError:
        raise InvalidInput(f"{path}: a text in it is not UTF-8: the file is damaged") from None
    except (MemoryError, RecursionError):
        raise InvalidInput(f"{path}: too large or nested too deep for this machine") from None


def listed(names: Sequence[str]) -> str:
    """Names for an error, however many there are and however long they are."""
    shown = ", ".join(f"{name:.60}" for name in names[:8])
    return shown if len(names) <= 8 else f"{shown}, ... ({len(names)} in all)"

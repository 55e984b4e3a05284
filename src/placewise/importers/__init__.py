"""Problems and graphs from other people's files, one format per module. What they hold is checked before it is used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from placewise.errors import InvalidInput, Unsupported


def require(module: str, extra: str) -> Any:
    """Import a module that one of the package's extras brings."""
    try:
        return import_module(module)
    except ImportError as error:
        what = "is not installed" if isinstance(error, ModuleNotFoundError) else f"cannot be imported ({error})"
        raise Unsupported(f"{module} {what}: pip install 'placewise[{extra}]'") from None


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

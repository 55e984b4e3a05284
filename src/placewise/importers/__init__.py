"""Problems and graphs from other people's files, one format per module. What they hold is checked before it is used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from placewise.errors import Unsupported


def require(module: str, extra: str) -> Any:
    """Import a module that one of the package's extras brings."""
    try:
        return import_module(module)
    except ImportError as error:
        what = "is not installed" if isinstance(error, ModuleNotFoundError) else f"cannot be imported ({error})"
        raise Unsupported(f"{module} {what}: pip install 'placewise[{extra}]'") from None

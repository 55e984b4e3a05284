"""Stdout is for results alone."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_STDOUT = 1  # the file descriptor


@contextmanager
def quiet() -> Iterator[None]:
    """What libraries print past Python, as HiGHS and METIS do now and then, goes nowhere."""
    try:
        library: Any = ctypes.CDLL(None)
        sys.stdout.flush()
        kept, nowhere = os.dup(_STDOUT), os.open(os.devnull, os.O_WRONLY)
    except (OSError, TypeError, AttributeError, ValueError):
        yield
        return
    try:
        library.fflush(None)
        os.dup2(nowhere, _STDOUT)
        yield
    finally:
        library.fflush(None)
        os.dup2(kept, _STDOUT)
        os.close(kept)
        os.close(nowhere)

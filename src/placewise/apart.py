"""Work in another process: on another core, and ended at any time, which compiled code here cannot be."""

from __future__ import annotations

import os
import pickle
import select
import signal
import struct
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Final

POSSIBLE: Final = hasattr(os, "fork")

_GLANCE: Final = 0.1  # seconds from one look at whether to go on to the next
_LENGTH: Final = struct.Struct("<Q")  # before each message


class Apart:
    """Work in another process, which ends with the block, if not before. What it sends arrives here, in order."""

    def __init__(self, work: Callable[[Callable[[Any], None]], None]) -> None:
        self._reading, writing = os.pipe()
        self._arrived = bytearray()
        self.done = False
        parent = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # other threads: they are idle, and stay behind
            self._child = os.fork()
        if not self._child:
            try:
                os.close(self._reading)
                _work(work, writing, parent)
            finally:
                os._exit(0)
        os.close(writing)

    def received(self, wait: float = 0.0) -> list[Any]:
        """What has arrived since; waits at most so long for something to."""
        while not self.done and select.select([self._reading], [], [], wait)[0]:
            part = os.read(self._reading, 1 << 20)
            self.done, wait = not part, 0.0
            self._arrived += part
        found, start = [], 0
        while len(self._arrived) >= start + _LENGTH.size:
            end = start + _LENGTH.size + _LENGTH.unpack_from(self._arrived, start)[0]
            if len(self._arrived) < end:
                break
            found.append(pickle.loads(self._arrived[start + _LENGTH.size : end]))
            start = end
        del self._arrived[:start]
        return found

    def __enter__(self) -> Apart:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._reading)
        os.kill(self._child, signal.SIGKILL)
        os.waitpid(self._child, 0)


def stream(work: Callable[[Callable[[Any], None]], None], wanted: Callable[[], bool]) -> Iterator[Any]:
    """What the work sends, as it comes, in another process where there may be one, for as long as it is wanted.

    Signals are heard only outside compiled code, and a solver, once begun, cannot be asked to end. If it dies, as
    compiled code may, there is no more to come.
    """
    if not POSSIBLE:
        sent: list[Any] = []
        work(sent.append)
        yield from sent
        return
    with Apart(work) as other:
        while wanted() and not other.done:
            for found in other.received(_GLANCE):
                if isinstance(found, Exception):
                    raise found
                yield found


def answer(work: Callable[[], Any], wanted: Callable[[], bool]) -> Any:
    """What the work comes to, in another process where there may be one; None if it is not wanted any more."""
    for found in stream(lambda send: send(work()), wanted):
        return found
    if wanted():
        raise RuntimeError("it ended without an answer")
    return None


def _work(work: Callable[[Callable[[Any], None]], None], writing: int, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to both
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what compiled code says when it dies; other errors are sent
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    with os.fdopen(writing, "wb") as pipe:

        def send(message: Any) -> None:
            data = pickle.dumps(message)
            pipe.write(_LENGTH.pack(len(data)) + data)
            pipe.flush()

        try:
            work(send)
        except Exception as error:
            send(RuntimeError(f"{error!r:.200}"))


def _end_with(parent: int) -> None:
    """Nobody waits for an answer once the one who asked is gone."""
    while os.getppid() == parent:
        time.sleep(_GLANCE)
    os._exit(0)

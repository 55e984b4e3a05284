"""What a person at a terminal sees and does while a command works: talk on stderr, progress, Ctrl-C."""

import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

import typer

if TYPE_CHECKING:
    from placewise import measure
    from placewise.driver import Progress
    from placewise.learned import training


def printable(text: str) -> str:
    """A name may hold any characters, but not break the line, steer the terminal or turn the text around."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def say(text: str) -> None:
    """Talk, which is not the result."""
    print("\n".join(map(printable, text.split("\n"))), file=sys.stderr, flush=True)


def note(text: str) -> None:
    """What is worth knowing about the result."""
    say(f"note: {text}")


say_once = cache(say)

SELDOM = 30.0  # seconds between lines on what is no terminal
NAME = 34  # letters of who plans, or for which change


# ---- how far it is ---------------------------------------------------------------------------------------------------


@contextmanager
def planning() -> Iterator["Callable[[Progress], None]"]:
    """A line on the terminal that says how far a planner is; where stderr is not one, a line now and then.

    What a planner prints is talk too, and goes to stderr.
    """
    from rich.console import Console
    from rich.text import Text

    from placewise.plans import format_gap
    from placewise.quantities import format_seconds

    def line(now: "Progress") -> str:
        gap = f"  {format_gap(now.gap)}" if now.value < math.inf else ""
        name = now.planner if len(now.planner) <= NAME else f"…{now.planner[1 - NAME :]}"
        return (
            f"best {format_seconds(now.value)}  bound {format_seconds(now.lower_bound)}{gap}  {now.seconds:.1f} s"
            f"  {name}  {now.evaluations:,} evaluations  {now.detail}"
        ).rstrip()

    if not sys.stderr.isatty():
        with redirect_stdout(sys.stderr):
            yield _now_and_then(line)
        return
    console = Console(stderr=True)

    def in_one_line(now: "Progress") -> Text:
        text = Text(printable(line(now)))
        text.truncate(console.width - 2, overflow="ellipsis")  # beside the spinner
        return text

    with redirect_stdout(sys.stderr), console.status("planning") as status:
        yield lambda now: status.update(in_one_line(now))


@contextmanager
def learning() -> Iterator["Callable[[training.Progress], None] | None"]:
    """A line on the terminal that says how far a training is; where stderr is not one, a line now and then."""
    from rich.console import Console

    from placewise.quantities import format_seconds

    def line(now: "training.Progress") -> str:
        best, mean = ((f"{x:.3f}" if now.relative else format_seconds(x)) for x in (now.best, now.mean))
        of = " of the start" if now.relative else ""
        return (
            f"update {now.updates:,}  {now.evaluations:,} evaluations  {now.per_second:,.0f}/s"
            f"  best {best}  mean {mean}{of}"
        )

    if sys.stderr.isatty():
        with Console(stderr=True).status("training") as status:
            yield lambda now: status.update(line(now))
        return
    yield _now_and_then(line)


def _now_and_then(line: Callable[[Any], str]) -> Callable[[Any], None]:
    """Says how far it is, every so often: a log shows that there is progress, and short runs are silent."""
    said = time.monotonic()

    def show(now: Any) -> None:
        nonlocal said
        if time.monotonic() - said > SELDOM:
            said = time.monotonic()
            say(line(now))

    return show


@contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """A line on the terminal that says what is being done; nothing where stderr is not one."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(what) as status:
        yield lambda text: status.update(Text(printable(text)))


@contextmanager
def counting(what: str) -> Iterator["Callable[[measure.Progress], None]"]:
    """A bar on the terminal; nothing where stderr is not one."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=None)
        yield lambda now: bar.update(
            task, completed=now.done, total=now.wanted, description=printable(now.signature)[:40]
        )


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------


@contextmanager
def unhurried() -> Iterator[None]:
    """Who presses Ctrl-C twice wants the planner to end, not to lose what it found: that comes out first."""
    pressed: list[int] = []
    before = {n: signal.signal(n, lambda number, _: pressed.append(number)) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if pressed:
        stop("but all is written")


@contextmanager
def heard() -> Iterator[None]:
    """Ctrl-C that torch or another library swallows, or turns into an error of its own, is still Ctrl-C."""
    pressed: list[int] = []

    def hear(number: int, _: object) -> None:
        pressed.append(number)
        raise KeyboardInterrupt

    before = {n: signal.signal(n, hear) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except Exception:
        if not pressed:
            raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if pressed:
        raise KeyboardInterrupt


def stop(text: str) -> NoReturn:
    """Ctrl-C ends a planner early, not empty-handed; a calling script still learns of it, even if it comes again."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    say(f"interrupted: {text}")
    raise typer.Exit(130)

"""`placewise train`: policies that outlive the command, written every few seconds, so that nothing ends a training.

Every random number comes from the seed, the number of the update and the checkpoint: a training that was killed and
goes on gives the same weights as one that was not.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from placewise.driver import Budget, Context
from placewise.errors import InvalidInput, Unsupported
from placewise.learned import checkpoint, families, one_graph
from placewise.learned.episodes import Episodes, Order, Start, packed
from placewise.learned.grouping import Groups, few, units
from placewise.learned.placeto import (
    SHIPPED,
    Architecture,
    PlacetoLearner,
    View,
    check_options,
    network_of,
    run,
    settings_of,
    view_of,
)
from placewise.learned.reinforce import Learner, compute_device, single_threaded, update
from placewise.planners import get
from placewise.problem import Problem
from placewise.simulator import evaluate

METHODS: Final = ("placeto", *one_graph.METHODS)
_PLANNING: Final = ("policy", "train", "updates", "patience", "episodes", "passes")  # options
_SAVE_EVERY: Final = 5.0  # seconds
_REPORT_EVERY: Final = 0.2


@dataclass(frozen=True)
class Progress:
    """How a training stands."""

    updates: int
    evaluations: int
    per_second: float
    mean: float  # of the last update
    best: float  # of all; where there is more than one problem, of the last update
    relative: bool  # to where episodes begin; else in seconds
    finished: bool = True  # not interrupted


class Course(Protocol):
    """What is trained, one update after another."""

    learner: Learner
    relative: bool

    def step(self) -> tuple[float, float]:
        """One update: (mean, best) of its samples."""

    def facts(self) -> dict[str, Any]:
        """What a checkpoint says besides the learner's own state, as JSON."""


def train(
    method: str,
    problems: Sequence[Problem],
    out: str | Path,
    *,
    evaluations: int,
    seed: int = 0,
    resume: bool = False,
    policy: str | Path | None = None,
    logs: str | Path | None = None,
    options: Mapping[str, Any] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Progress:
    """Train until so many simulations are done in all; `out` is written every few seconds, and at the end.

    Without problems, `placeto` learns from generated families and bundled models. `resume` goes on with `out`, if it is
    there; `policy` names another file whose weights to begin with, or is `shipped`.
    """
    settings = get(checked(method)).settings(options or {})
    why = "a training goes on until --evaluations are done; --policy names a file to begin with"
    checkpoint.refuse_idle(method, settings, _PLANNING, why)
    for what, given, least in (("seed", seed, 0), ("evaluations", evaluations, 1)):
        if given < least:
            raise InvalidInput(f"{what} = {given}: it must be {least} or more")
    if seed >= 2**63:
        raise InvalidInput(f"seed = {seed}: it must be below 2**63")
    if resume and policy is not None:
        raise InvalidInput("--resume goes on with what is in --out, so --policy has no place beside it")
    if Path(out).exists() and not resume:
        raise InvalidInput(f"{out}: there is a file already; --resume goes on with it, or give another --out")
    course = _course(method, problems, evaluations, seed, settings)
    learner = course.learner
    if resume and Path(out).exists():
        _go_on(course, checkpoint.load(out, method), out)
    elif policy is not None:
        path = SHIPPED if (method, str(policy)) == ("placeto", "shipped") else policy
        found = checkpoint.load(path, method)
        if "problem" in course.facts() and found.facts.get("problem") != course.facts()["problem"]:
            raise InvalidInput(
                f"{path}: a policy of {method} serves the one problem that it was trained on, not this one"
            )
        checkpoint.begin_with(learner, found, path)
    began, before = time.perf_counter(), learner.evaluations
    saved = shown = -np.inf

    def progress() -> Progress:
        now, rate = learner, (learner.evaluations - before) / max(time.perf_counter() - began, 1e-9)
        return Progress(now.updates, now.evaluations, rate, now.mean, now.best, course.relative, not stop)

    with _writer(logs, learner.updates) as write, _interruptible() as stop, single_threaded():
        while learner.evaluations < evaluations and not stop:
            updates = learner.updates
            learner.mean, low = course.step()
            learner.best = low if course.relative else min(low, learner.best)
            now = time.perf_counter()
            if now - saved > _SAVE_EVERY:
                checkpoint.save(out, method, learner, course.facts())
                saved = now
            if now - shown > _REPORT_EVERY and on_progress:
                on_progress(progress())
                shown = now
            if learner.updates > updates:
                write(progress())
        checkpoint.save(out, method, learner, course.facts())
    return progress()


def checked(method: str) -> str:
    """The name of a method that can be trained, or an error."""
    if method not in METHODS:
        raise InvalidInput(f"there is no method {method!r:.60} to train; there are {', '.join(METHODS)}")
    return method


def _go_on(course: Course, found: checkpoint.Checkpoint, path: str | Path) -> None:
    for key, value in course.facts().items():
        if key in ("problem", "problems") and found.facts.get(key) != value:
            raise InvalidInput(
                f"{path}: was trained with other problems: give the models, the boxes and the objective that it was "
                "trained with, in their order, or begin another --out with --policy"
            )
        if key != "horizon" and found.facts.get(key) != value:
            raise InvalidInput(
                f"{path}: was trained with {key} {found.facts.get(key)!r:.80}, not {value!r:.80}: "
                "give what it was trained with, or begin another --out with --policy"
            )
    checkpoint.restore(course.learner, found, path)


def _course(method: str, problems: Sequence[Problem], evaluations: int, seed: int, options: dict[str, Any]) -> Course:
    for problem in problems:
        if (reason := get(method).why_not(problem)) is not None:
            raise Unsupported(f"{problem.graph.name}: {method} {reason}")
    if method == "placeto":
        return Family(problems, seed, options, evaluations)
    if len(problems) != 1:
        raise InvalidInput(f"{method} learns one graph at a time: name one model")
    return OneGraph(method, problems[0], seed, options, evaluations)


# ---- one graph -------------------------------------------------------------------------------------------------------


class OneGraph:
    """A method that places a whole graph at once."""

    relative = False

    def __init__(self, method: str, problem: Problem, seed: int, options: dict[str, Any], evaluations: int) -> None:
        self._evaluations = evaluations
        updates = max(1, evaluations // max(1, options["samples"]))
        ending = options | {"horizon": min(options["horizon"], updates)}  # exploration ends when the training does
        self.learner, self._policy, self._reward = one_graph.pupil(method, problem, seed, ending)
        self._ctx = Context(problem, Budget(), seed, 0.0, None, method)
        self._facts = {"problem": problem.digest, "seed": seed, "options": options}

    def step(self) -> tuple[float, float]:
        """Of the samples that keep every constraint."""
        left = self._evaluations - self.learner.evaluations
        values = update(self._ctx, self.learner, self._policy, self._reward, most=left)
        valid = values[np.isfinite(values)]
        return (float(valid.mean()), float(valid.min())) if len(valid) else (np.inf, np.inf)

    def facts(self) -> dict[str, Any]:
        """What must be the same for the training to go on."""
        return self._facts


# ---- many graphs -----------------------------------------------------------------------------------------------------


class Task(NamedTuple):
    """What one update of Placeto works on."""

    groups: Groups
    start: Start
    name: str | None  # of a problem that comes again


class Family:
    """Placeto on a list of problems in turn, or on problems that are drawn."""

    def __init__(self, problems: Sequence[Problem], seed: int, options: dict[str, Any], evaluations: int) -> None:
        check_options(options)
        self.relative = len(problems) != 1
        self._problems, self._seed, self._options, self._evaluations = list(problems), seed, options, evaluations
        build = Architecture(options["view"], options["width"], options["rounds"])
        counts = {problem.num_devices for problem in problems}
        if build.view == "paper" and len(counts) != 1:
            raise InvalidInput("view=paper: all problems must have the same number of devices")
        self._build = build
        self._views = cache(self._view)
        network = network_of(build, self._view_of(self.task(0)), seed).to(compute_device())
        settings = settings_of(options, evaluations // (options["batch"] * _TYPICAL))
        self.learner: Learner = PlacetoLearner(
            network, settings, seed, discount=options["discount"], final=options["reward"] == "final"
        )

    def task(self, update: int) -> Task:
        """The problem of an update; the same whenever it is asked for."""
        rng = np.random.default_rng([self._seed, update])
        start: Start = "packed" if rng.random() < 0.5 else "random"
        if self._problems:
            index = update % len(self._problems)
            problem = self._problems[index]
            return Task(self._views(index).groups, start, problem.digest[:16])
        return Task(_drawn(rng), start, None)

    def step(self) -> tuple[float, float]:
        """Relative to a placement that packs the fastest device first, or to all groups one by one where that does
        not fit; in seconds where there is one problem.
        """
        learner, options = self.learner, self._options
        assert isinstance(learner, PlacetoLearner)
        groups, start, name = self.task(learner.updates)
        view = self._view_of(Task(groups, start, name))
        whole = True

        def score(rows: Any) -> Any:
            nonlocal whole
            left = self._evaluations - learner.evaluations
            whole = whole and len(rows) <= left
            learner.evaluations += len(rows[:left])
            return evaluate(groups.problem, rows[:left], peaks=False, threads=1).score

        reference = score(groups.expand(packed(groups)[None])) if self.relative else np.ones(1)
        rng = np.random.default_rng([self._seed, learner.updates, 1])
        order: Order = options["order"]
        episodes = Episodes(groups, options["batch"], score, rng, start=start, order=order, log=True)
        record = run(learner.network, view, episodes, learner.generator, should_stop=lambda: not whole)
        if not whole:  # nothing is learned from episodes that the budget cut short
            return learner.mean, learner.best
        learner.learn(view, record, name)
        found = record.values / max(float(reference[0]) if np.isfinite(reference[0]) else episodes.scale, 1e-300)
        last = found[-1][np.isfinite(found[-1])]
        return float(last.mean()) if len(last) else np.inf, float(found.min())

    def facts(self) -> dict[str, Any]:
        """How the network is built, and what must be the same for the training to go on."""
        return {
            "build": self._build._asdict(), "seed": self._seed, "options": self._options,
            "problems": [problem.digest for problem in self._problems], "horizon": self.learner.settings.horizon,
        }  # fmt: skip

    def _view(self, index: int) -> View:
        problem = self._problems[index]
        return view_of(self._build.view, few(problem, self._options["groups"]))

    def _view_of(self, task: Task) -> View:
        if self._problems:
            return self._views([problem.digest[:16] for problem in self._problems].index(task.name or ""))
        return view_of(self._build.view, task.groups)


_TYPICAL: Final = 14  # simulations per episode: groups that are moved

#: Bundled models and boxes that a policy may learn from; all others show what it has learned.
SEEN_MODELS: Final = (
    "alexnet", "vgg-19", "googlenet", "squeezenet", "inception-v3", "resnet-50", "rnnlm", "gnmt", "gpt-2",
    "inception-v3-train", "rnnlm-train",
)  # fmt: skip
SEEN_BOXES: Final = ("two-gpus-one-host", "four-gpus", "unequal-cards", "placeto-2", "placeto-4", "hierarchical-4")
_ZOO_SHARE: Final = 0.15


def _drawn(rng: np.random.Generator) -> Groups:
    """A generated problem, or at times a bundled model in few groups."""
    if rng.random() < _ZOO_SHARE:
        model, box = str(rng.choice(SEEN_MODELS)), str(rng.choice(SEEN_BOXES))
        return _bundled(model, box, int(rng.choice([16, 24, 32, 40])))
    return units(families.draw(str(rng.choice(families.NAMES)), rng))


@cache
def _bundled(model: str, box: str, most: int) -> Groups:
    return few(_problem(model, box), most)


@cache
def _problem(model: str, box: str) -> Problem:
    from placewise.files import load_problem

    return load_problem(model, box)


# ---- signals and logs ------------------------------------------------------------------------------------------------


@contextmanager
def _interruptible() -> Iterator[list[int]]:
    """A list, empty until Ctrl-C, or SIGTERM where that does the same, as in the command.

    The update that has begun is finished then, and the checkpoint written.
    """
    pressed: list[int] = []

    def hear(number: int, frame: Any) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    in_main = threading.current_thread() is threading.main_thread()
    ours = [n for n in (signal.SIGINT, signal.SIGTERM) if in_main and signal.getsignal(n) is signal.default_int_handler]
    for number in ours:
        signal.signal(number, hear)
    try:
        yield pressed
    finally:
        for number in ours:
            signal.signal(number, signal.default_int_handler)


@contextmanager
def _writer(folder: str | Path | None, first: int) -> Iterator[Callable[[Progress], None]]:
    """What TensorBoard shows: the mean and the best of each update over evaluations."""
    if folder is None:
        yield lambda _: None
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise Unsupported("--logs needs TensorBoard: pip install 'placewise[learned]'") from None
    try:
        writer = SummaryWriter(str(folder), purge_step=first + 1)
    except OSError as error:
        raise InvalidInput(f"{folder}: --logs needs a folder to write to: {error.strerror or error}") from None
    with writer as logs:

        def write(now: Progress) -> None:
            for name in ("mean", "best", "per_second", "evaluations"):
                logs.add_scalar(name, getattr(now, name), now.updates)

        yield write

"""The command line: parse, call, print. Results go to stdout, talk goes to stderr.

Only what parses is imported here; each command imports what it needs, so that `placewise --help` answers at once.
"""

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from placewise import __version__
from placewise.errors import InvalidInput, NoFeasiblePlan, PlacewiseError

if TYPE_CHECKING:
    from placewise.plans import Plan
    from placewise.problem import Problem

app = typer.Typer(
    help="Decides which device runs each operation of a neural network, and says how far from the best that is.",
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help: it needs no further import and can be pasted
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run a command. What is wrong with the request is said in one line; a traceback is a bug."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # names may hold characters that the terminal cannot show
    try:
        app(prog_name="placewise")
    except PlacewiseError as error:
        _say(f"error: {error}")
        sys.exit(error.exit_code)
    except OSError as error:
        _say(f"error: {error.filename}: {error.strerror}" if error.filename else f"error: {error.strerror or error}")
        sys.exit(1)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"placewise {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options that stand before the command."""


# ---- names that the shell can complete -------------------------------------------------------------------------------


def _complete_model(incomplete: str) -> list[str]:
    from placewise import zoo

    return [*(name for name in zoo.names() if name.startswith(incomplete)), *map(str, Path().glob(f"{incomplete}*"))]


def _complete_cluster(incomplete: str) -> list[str]:
    from placewise.files import bundled_boxes

    return [
        *(name for name in bundled_boxes() if name.startswith(incomplete)),
        *map(str, Path().glob(f"{incomplete}*")),
    ]


def _complete_planner(incomplete: str) -> list[str]:
    from placewise import planners

    return [name for name in planners.available() if name.startswith(incomplete)]


# ---- what to plan ----------------------------------------------------------------------------------------------------

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A problem or graph file, a public benchmark file, or the name of a bundled model.",
        autocompletion=_complete_model,
    ),
]
Box = Annotated[
    str | None,
    typer.Option(
        "--cluster", help="A cluster file (YAML) or the name of a bundled box.", autocompletion=_complete_cluster
    ),
]
Goal = Annotated[
    Literal["latency", "throughput", "completion"] | None,
    typer.Option("--objective", help="What to minimise; latency by default."),
]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


def _problem(
    model: Model,
    cluster: Box = None,
    objective: Goal = None,
    max_memory: Annotated[str | None, typer.Option(help="Memory to use, such as gpu0=20GiB,cpu=64GiB.")] = None,
    pin: Annotated[list[str] | None, typer.Option(metavar="OP=DEVICE", help="Keep an op on a device.")] = None,
    forbid: Annotated[list[str] | None, typer.Option(metavar="DEVICE", help="Use no such device.")] = None,
    contiguous: Annotated[
        bool, typer.Option("--contiguous", help="Each device gets an interval of the dataflow.")
    ] = False,
    max_devices: Annotated[int | None, typer.Option(help="Use at most so many devices.")] = None,
    place_parameters: Annotated[
        bool, typer.Option("--place-parameters", help="Weights may live elsewhere than their ops (offloading).")
    ] = False,
    contention: Annotated[
        Literal["none", "channel"] | None, typer.Option(help="Do transfers queue for channels?")
    ] = None,
    concurrency: Annotated[
        Literal["parallel", "sequential"] | None, typer.Option(help="Do devices run at the same time?")
    ] = None,
) -> "Problem":
    """The problem that the options describe; what is not given is as the file has it."""
    from dataclasses import replace

    from placewise.files import load_problem
    from placewise.quantities import parse_quantity

    limits = [_split(part, "--max-memory") for part in (max_memory or "").split(",") if part]
    problem = load_problem(
        model,
        cluster,
        objective=objective,
        pins=dict(_split(text, "--pin") for text in pin) if pin else None,
        forbidden=tuple(forbid) if forbid else None,
        contiguous=contiguous or None,
        max_devices=max_devices,
        max_memory={device: parse_quantity(limit, "bytes") for device, limit in limits},
        place_parameters=place_parameters,
    )
    settings = {"contention": contention, "concurrency": concurrency}
    given: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
    return replace(problem, execution=replace(problem.execution, **given)) if given else problem


def _split(text: str, option: str) -> tuple[str, str]:
    """NAME=VALUE at the last sign, for op names may contain one."""
    name, sign, value = text.rpartition("=")
    if not (name and sign and value):
        raise InvalidInput(f"{option} {text!r}: write it like NAME=VALUE")
    return name, value


def _takes_problem(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of `_problem` in place of its first parameter, the problem that they describe."""
    shared = signature(_problem).parameters
    own = dict(list(signature(command).parameters.items())[1:])

    @wraps(command)
    def run(**given: Any) -> None:
        problem = _problem(**{name: given.pop(name) for name in shared})
        command(problem, **given)

    run.__signature__ = Signature([*shared.values(), *own.values()])  # type: ignore[attr-defined]
    run.__annotations__ = {name: parameter.annotation for name, parameter in {**shared, **own}.items()}
    return run


# ---- commands --------------------------------------------------------------------------------------------------------

BudgetText = Annotated[
    str, typer.Option("--budget", metavar="TIME", help="Time for each planner, such as 30s or 5min.")
]
Evaluations = Annotated[int | None, typer.Option(help="Placements that each planner may simulate.")]
Seed = Annotated[int, typer.Option(help="With a budget in evaluations, the same seed gives the same plan.")]


@app.command()
@_takes_problem
def plan(
    problem: "Problem",
    planner: Annotated[
        str | None,
        typer.Option(
            help="The method, local-search by default; see `placewise planners`.", autocompletion=_complete_planner
        ),
    ] = None,
    budget: BudgetText = "10s",
    evaluations: Evaluations = None,
    seed: Seed = 0,
    option: Annotated[
        list[str] | None, typer.Option("-o", metavar="KEY=VALUE", help="An option of the planner.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where to write the plan.")] = Path("plan.json"),
    as_json: AsJson = False,
) -> None:
    """Find a plan and write it to a file."""
    from placewise import planners
    from placewise.driver import DEFAULT_PLANNER
    from placewise.report.table import describe_plan

    if not out.parent.is_dir() or out.is_dir():  # better told now than after the budget is spent
        raise InvalidInput(
            f"--out {out}: " + ("it is a folder" if out.is_dir() else f"there is no folder {out.parent}")
        )
    name = planner or DEFAULT_PLANNER
    found = _run(problem, name, budget, evaluations, seed, planners.parse_options(name, option or []))
    found.save(out)
    print(_json(_plan_facts(found) | {"plan": str(out)}) if as_json else describe_plan(found))
    _say(f"wrote {out}")
    _stop_if(found.stopped == "interrupted")


@app.command()
@_takes_problem
def compare(
    problem: "Problem",
    planners: Annotated[
        str | None, typer.Option(metavar="A,B,C", help="Only these; all that apply by default.")
    ] = None,
    budget: BudgetText = "10s",
    evaluations: Evaluations = None,
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to write the best plan and its trace.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run many planners with the same budget each, and print one table."""
    from placewise.files import write_text
    from placewise.planners import available, get
    from placewise.report.table import describe_comparison, gap_to
    from placewise.report.trace import to_trace

    if out:
        out.mkdir(parents=True, exist_ok=True)
    chosen = [get(name) for name in ([name.strip() for name in planners.split(",")] if planners else available())]
    outcomes: dict[str, Plan | str] = {}
    interrupted = False
    for info in chosen:
        name, why_not = info.name, info.why_not(problem)
        if interrupted or why_not:
            outcomes[name] = why_not or "interrupted"
            continue
        try:
            outcomes[name] = found = _run(problem, name, budget, evaluations, seed)
            interrupted = found.stopped == "interrupted"
        except NoFeasiblePlan as error:
            outcomes[name] = str(error)
        except KeyboardInterrupt:  # before there was a plan
            outcomes[name], interrupted = "interrupted", True
    plans = [found for found in outcomes.values() if not isinstance(found, str)]
    best = min(plans, key=lambda found: found.value, default=None)
    if best and out:
        best.save(out / "plan.json")
        write_text(out / "trace.json", to_trace(best))
    one_device = _best_single_device(problem)
    if as_json:
        bound = max((found.lower_bound for found in plans), default=0.0)
        rows = [
            {"planner": name, "reason": found}
            if isinstance(found, str)
            else _plan_facts(found) | {"gap": gap_to(bound, found), "beaten_by_one_device": found.value > one_device}
            for name, found in outcomes.items()
        ]
        print(_json({"best": best and best.planner, "lower_bound": bound, "one_device": one_device, "planners": rows}))
    else:
        print(describe_comparison(outcomes, one_device))
    if best is None and not interrupted:
        raise NoFeasiblePlan("no planner found a plan that keeps every constraint")
    if best and out:
        _say(f"wrote {out / 'plan.json'} and {out / 'trace.json'} (open the trace in ui.perfetto.dev)")
    _stop_if(interrupted)


@app.command()
def simulate(plan: PlanFile, as_json: AsJson = False) -> None:
    """Simulate a plan file anew: time, memory, transfers."""
    from placewise.report.table import describe_simulation

    found = _load(plan)
    if not as_json:
        print(describe_simulation(found))
        return
    timeline, cluster = found.timeline, found.problem.cluster
    channels = dict(zip(cluster.channels, timeline.channel_busy.tolist(), strict=True))
    moved = {"transfers": len(timeline.transfers), "bytes_moved": timeline.bytes_moved, "channel_busy": channels}
    print(_json(_plan_facts(found) | {"feasible": True, "makespan": timeline.makespan} | moved))


@app.command()
def explain(
    plan: PlanFile,
    op: Annotated[str | None, typer.Option(metavar="NAME", help="What would each device give for this op?")] = None,
    as_json: AsJson = False,
) -> None:
    """Say what limits a plan."""
    from dataclasses import asdict

    from placewise.report import explain as reasons
    from placewise.report.table import describe_explanation, describe_moves

    found = _load(plan)
    if op is not None:
        moves = reasons.moves_of(found.timeline, found.problem.graph.op_index(op))
        print(
            _json({"op": op, "moves": [asdict(move) for move in moves]})
            if as_json
            else describe_moves(found, op, moves)
        )
        return
    why = reasons.explain(found.timeline)
    if not as_json:
        print(describe_explanation(found, why))
        return
    names = found.problem.graph.op_names
    facts = asdict(why)
    for step in facts["chain"]:
        step |= {"op": names[step["op"]], "behind": None if step["behind"] is None else names[step["behind"]]}
    print(_json(_plan_facts(found) | facts))


@app.command()
def export(
    plan: PlanFile,
    to: Annotated[Literal["trace"], typer.Option(help="trace: Chrome JSON for ui.perfetto.dev.")],
    out: Annotated[Path | None, typer.Option(help="Where to write it; stdout by default.")] = None,
) -> None:
    """Write a plan in the form that another program reads."""
    from placewise.files import write_text
    from placewise.report.trace import to_trace

    text = to_trace(_load(plan))
    if out is None:
        sys.stdout.write(text)
    else:
        write_text(out, text)
        _say(f"wrote {out}")


@app.command()
def planners(
    model: Annotated[
        str | None, typer.Argument(help="Say which planners apply to this model.", autocompletion=_complete_model)
    ] = None,
    cluster: Box = None,
    objective: Goal = None,
    as_json: AsJson = False,
) -> None:
    """List the planners, what they minimise, and their options."""
    from placewise.planners import available
    from placewise.report.table import describe_planners

    infos = available()
    problem = None if model is None else _problem(model, cluster, objective)
    why_not = {} if problem is None else {name: info.why_not(problem) for name, info in infos.items()}
    if not as_json:
        print(describe_planners(infos, why_not))
        return
    rows = []
    for name, info in infos.items():
        options = {key: {"type": kind.__name__, "default": default} for key, (kind, default) in info.options.items()}
        row = {"planner": name, "summary": info.summary, "objectives": sorted(info.objectives), "options": options}
        rows.append(row | ({"applies": why_not[name] is None, "reason": why_not[name]} if why_not else {}))
    print(_json({"planners": rows}))


# ---- shared by the commands ------------------------------------------------------------------------------------------


def _run(
    problem: "Problem",
    name: str,
    budget: str,
    evaluations: int | None,
    seed: int,
    options: dict[str, Any] | None = None,
) -> "Plan":
    from placewise import driver, planners
    from placewise.quantities import parse_quantity

    limit = driver.Budget(seconds=parse_quantity(budget, "seconds"), evaluations=evaluations)
    driver.compile_for(problem, planners.get(name), _say)
    with _progress(name) as show:
        return driver.plan(problem, name, budget=limit, seed=seed, options=options, on_progress=show)


@contextmanager
def _progress(name: str) -> Iterator[Callable[[Any], None] | None]:
    """A line on the terminal that says how far a planner is; nothing where stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    from placewise.quantities import format_seconds

    with Console(stderr=True).status(name) as status:
        yield lambda p: status.update(
            f"{name}  {p.seconds:.1f} s  {p.evaluations:,} evaluations  best {format_seconds(p.value)}"
            f"  bound {format_seconds(p.lower_bound)}"
        )


def _load(path: Path) -> "Plan":
    from placewise.files import load_plan
    from placewise.simulator.evaluation import announced

    with announced("compiling the simulator (once per installation)", _say):
        return load_plan(path)


def _stop_if(interrupted: bool) -> None:
    """Ctrl-C ends a planner early, not empty-handed; a calling script still learns of it."""
    if interrupted:
        _say("interrupted: this is the best plan so far")
        raise typer.Exit(130)


def _best_single_device(problem: "Problem") -> float:
    """The value of the best plan that uses one device alone; infinity where none fits."""
    import numpy as np

    from placewise.simulator import evaluate

    rows = np.repeat(np.arange(problem.num_devices, dtype=np.int32)[:, None], problem.num_ops, axis=1)
    return float(evaluate(problem, rows).score.min())


def _plan_facts(found: "Plan") -> dict[str, Any]:
    """What every command says about a plan in JSON; seconds and bytes."""
    problem, timeline = found.problem, found.timeline
    devices = {
        device.name: {
            "ops": int((found.placement == d).sum()),
            "busy": float(timeline.busy[d]),
            "peak_memory": float(timeline.peak[d]),
            "memory": device.memory,
        }
        for d, device in enumerate(problem.cluster.devices)
    }
    return {
        "model": problem.graph.name, "cluster": problem.cluster.name, "objective": problem.objective,
        "planner": found.planner, "options": dict(found.options), "seed": found.seed,
        "value": found.value, "lower_bound": found.lower_bound, "gap": found.gap,
        "seconds": found.seconds, "evaluations": found.evaluations, "stopped": found.stopped, "devices": devices,
    }  # fmt: skip


def _json(value: Any) -> str:
    return json.dumps(_finite(value), indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    """JSON has no infinity: what is unlimited or unknown is null."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

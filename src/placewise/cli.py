"""The command line: parse, call, print. Results go to stdout, talk goes to stderr.

Only what parses is imported here; each command imports what it needs, so that `placewise --help` answers at once.
"""

import _thread
import math
import os
import signal
import sys
import threading
import traceback
import warnings
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
import typer.core

from placewise import __version__, terminal
from placewise.errors import DoesNotHold, InvalidInput, NoFeasiblePlan, PlacewiseError, Unsupported
from placewise.options import (
    BEST_FILES,
    AsJson,
    Box,
    BudgetText,
    Dims,
    Evaluations,
    Goal,
    PlanFile,
    Seed,
    Settings,
    budget_of,
    check_apart,
    check_folder,
    check_writable,
    complete_cluster,
    complete_engine,
    complete_model,
    complete_planner,
    execution_of,
    pairs,
    positive,
    problem_of,
    quantity,
    sizes,
    takes_problem,
)
from placewise.report.facts import comparison_facts, graph_facts, plan_facts, to_json

if TYPE_CHECKING:
    from placewise.plans import Plan
    from placewise.problem import Execution, Problem


class _Commands(typer.core.TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        """Run a command. Ctrl-C ends it with a word and a code, whichever version of Typer there is."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # else nobody learns that there is no room for the result
            return result
        except KeyboardInterrupt:
            terminal.stop("there is no result yet")


app = typer.Typer(
    cls=_Commands,
    help="Decides which device runs each operation of a neural network, and says how far from the best that is.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,  # plain help: it needs no further import and can be pasted
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run a command. What is wrong with the request is said in one line; a traceback is a bug."""
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # names may hold characters that the terminal cannot show
    sys.unraisablehook = _press_again
    warnings.showwarning = lambda message, *_, **__: terminal.say(f"warning: {message}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # whoever ends us wants the best so far, as with Ctrl-C
    try:
        app(prog_name="placewise")
    except PlacewiseError as error:
        terminal.say(terminal.printable(f"error: {error}"))
        sys.exit(error.exit_code)
    except KeyboardInterrupt:  # before a command has begun
        terminal.say("interrupted: there is no result yet")
        sys.exit(130)
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else f"{error.strerror or error}"
        terminal.say(terminal.printable(f"error: {what}"))
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - it may be what cannot be written, and is flushed at the end
        sys.exit(1)
    except Exception as error:
        frames = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__))
        if not any(Path(name).parts[-3:] == ("numba", "core", "caching.py") for name in frames):
            raise
        terminal.say(
            f"error: compiled code cannot be kept on disk, or what is kept is damaged ({error}); "
            "set NUMBA_CACHE_DIR to an empty folder that you may write to"
        )
        sys.exit(1)


def _press_again(lost: Any) -> None:
    """Ctrl-C goes unheard while compiled code calls back (LLVM does), so it is pressed once more a moment later."""
    if lost.exc_type is KeyboardInterrupt:
        threading.Timer(0.01, _thread.interrupt_main).start()
    else:
        sys.__unraisablehook__(lost)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"placewise {__version__}", flush=True)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options that stand before the command."""


# ---- commands --------------------------------------------------------------------------------------------------------


@app.command()
@takes_problem
def plan(
    problem: "Problem",
    planner: Annotated[
        str | None,
        typer.Option(help="The method, auto by default; see `placewise planners`.", autocompletion=complete_planner),
    ] = None,
    budget: BudgetText = None,
    evaluations: Evaluations = None,
    seed: Seed = 0,
    option: Annotated[
        list[str] | None, typer.Option("-o", metavar="KEY=VALUE", help="An option of the planner.")
    ] = None,
    shards: Annotated[
        int | None, typer.Option(help="Up to so many like devices may be one, each with a part of every op.")
    ] = None,
    uniform: Annotated[
        bool, typer.Option("--uniform", help="With --shards: as many everywhere, as engines have it.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Where to write the plan.")] = Path("plan.json"),
    as_json: AsJson = False,
) -> None:
    """Find a plan and write it to a file."""
    from placewise import driver, planners
    from placewise.report.table import describe_plan
    from placewise.sharding import plan_sharded

    check_writable(out)
    if uniform and shards is None:
        raise InvalidInput("--uniform: this is for --shards")
    name = driver.DEFAULT_PLANNER if planner is None else planner
    options, limit = planners.parse_options(name, option or []), budget_of(budget, evaluations)
    driver.compile_for(problem, planners.get(name), terminal.say_once)
    work = driver.plan if shards is None else partial(plan_sharded, most=shards, uniform=uniform)
    with terminal.planning() as show:
        found = work(problem, planner=name, budget=limit, seed=seed, options=options, on_progress=show)
    with terminal.unhurried():
        found.save(out)
        print(to_json(plan_facts(found) | {"plan": str(out)}) if as_json else describe_plan(found), flush=True)
        terminal.say(f"wrote {out}")
    if found.stopped == "interrupted":
        terminal.stop("this is the best plan so far")


@app.command()
@takes_problem
def compare(
    problems: "list[Problem]",
    planners: Annotated[
        str | None, typer.Option(metavar="A,B,C", help="Only these; all that apply by default.")
    ] = None,
    budget: BudgetText = None,
    evaluations: Evaluations = None,
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to write the best plan and its trace.")] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A picture (.svg or .png): quality against time; of several models, performance profiles.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run many planners with the same budget each, and print one table for each model."""
    from placewise import driver
    from placewise.files import write_text
    from placewise.planners import available, get
    from placewise.report import plots
    from placewise.report.table import describe_comparison, describe_comparisons
    from placewise.report.trace import to_trace

    chosen = [get(name.strip()) for name in (available() if planners is None else planners.split(","))]
    limit = budget_of(budget, evaluations)
    if plot:
        plots.check_format(plot)
        check_writable(plot, "--plot")
    if out:
        if len(problems) > 1:
            raise InvalidInput(f"--out {out}: name one model, since there is one best plan for each")
        check_folder(out, BEST_FILES)
    comparisons: list[list[driver.Outcome]] = []
    facts = []
    for problem in problems:
        for info in chosen:
            with suppress(Unsupported):  # `compare` says why, and goes on with the others
                driver.compile_for(problem, info, terminal.say_once)
        one_device = driver.one_device_value(problem)
        names = [info.name for info in chosen]
        with terminal.planning() as show:
            outcomes = driver.compare(problem, names, budget=limit, seed=seed, on_progress=show)
        comparisons.append(outcomes)
        facts.append(comparison_facts(outcomes, one_device))
        if not as_json:
            print(describe_comparison(outcomes, one_device), end="\n\n" if len(problems) > 1 else "\n", flush=True)
        interrupted = any("interrupted" in (row.reason, row.plan and row.plan.stopped) for row in outcomes)
        if interrupted:
            break
    best = comparisons[0][0].plan
    with terminal.unhurried():
        if as_json:
            print(to_json(facts[0] if len(problems) == 1 else {"comparisons": facts}), flush=True)
        elif len(comparisons) > 1:
            print(describe_comparisons(comparisons), flush=True)
        if best and out:
            out.mkdir(exist_ok=True)
            to_plan, trace = (out / name for name in BEST_FILES)
            best.save(to_plan)
            write_text(trace, to_trace(best))
            terminal.say(f"wrote {to_plan} and {trace} (open the trace in ui.perfetto.dev)")
        if plot:
            plots.plot(comparisons, plot)
            terminal.say(f"wrote {plot}")
    if interrupted:
        terminal.stop("this is the best plan so far" if best else "there is no plan yet")
    if not any(outcomes[0].plan for outcomes in comparisons):
        raise NoFeasiblePlan("no planner found a plan that keeps every constraint")


@app.command()
def simulate(plan: PlanFile, execution: Settings = None, as_json: AsJson = False) -> None:
    """Simulate a plan file anew: time, memory, transfers."""
    from placewise.report.table import describe_simulation

    found = _load(plan)
    if execution:
        found = _under(execution_of(found.problem.execution, execution), found)
    if not as_json:
        print(describe_simulation(found))
        return
    timeline, cluster = found.timeline, found.problem.cluster
    channels = dict(zip(cluster.channels, timeline.channel_busy.tolist(), strict=True))
    moved = {"transfers": len(timeline.transfers), "bytes_moved": timeline.bytes_moved, "channel_busy": channels}
    print(to_json(plan_facts(found) | {"feasible": True, "makespan": timeline.makespan} | moved))


@app.command()
def check(plan: PlanFile, as_json: AsJson = False) -> None:
    """Work out again, without the simulator, what a plan claims: its value, its memory, its bound."""
    from dataclasses import asdict

    from placewise.certificate import check as findings_of
    from placewise.report.table import describe_findings

    found = _load(plan)
    findings = findings_of(found)
    print(to_json(plan_facts(found) | {"findings": [asdict(finding) for finding in findings]})
          if as_json else describe_findings(found, findings))  # fmt: skip
    wrong = [finding for finding in findings if finding.is_wrong]
    if wrong:
        raise InvalidInput(f"{plan}: {wrong[0].claim}: {wrong[0].verdict}")


@app.command()
def explain(
    plan: PlanFile,
    op: Annotated[str | None, typer.Option(metavar="NAME", help="What would each device give for this op?")] = None,
    what_if: Annotated[
        bool, typer.Option("--what-if", help="What would memory, another device or faster links gain? Plans anew.")
    ] = False,
    budget: Annotated[
        str | None, typer.Option(metavar="TIME", help="With --what-if: time to plan each change; 2s unless given.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what limits a plan."""
    from dataclasses import asdict

    from placewise import driver
    from placewise.planners import get as get_planner
    from placewise.report import explain as reasons
    from placewise.report.table import describe_explanation, describe_moves, describe_what_if
    from placewise.report.what_if import what_if as changes
    from placewise.simulator.bounds import lower_bound, made_of

    if what_if and op is not None:
        raise InvalidInput("--op and --what-if are two questions: ask one at a time")
    if budget is not None and not what_if:
        raise InvalidInput("--budget is for --what-if, which plans anew; the rest takes no planning")
    found = _load(plan)
    if what_if:
        driver.compile_for(found.problem, get_planner(driver.DEFAULT_PLANNER), terminal.say_once)
        rows, interrupted = [], False
        try:
            with terminal.planning() as show:
                for row in changes(found, budget=budget_of("2s" if budget is None else budget, None), on_progress=show):
                    rows.append(row)  # noqa: PERF402 - what came before Ctrl-C is kept
        except KeyboardInterrupt:
            if len(rows) < 2:  # the first changes nothing
                raise
            interrupted = True
        facts = {"what_if": [row._asdict() for row in rows]}
        print(to_json(plan_facts(found) | facts) if as_json else describe_what_if(found, rows), flush=True)
        if interrupted:
            terminal.stop("these are the changes so far")
        return
    if op is not None:
        moves = reasons.moves_of(found.timeline, found.problem.graph.op_index(op))
        print(
            to_json({"op": op, "moves": [asdict(move) for move in moves]})
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
    bound = {"bound_parts": lower_bound(found.problem).parts, "bound_made_of": made_of(found.problem)}
    print(to_json(plan_facts(found) | facts | bound))


@app.command()
def report(
    plans: Annotated[list[Path], typer.Argument(metavar="PLAN", help="Plan files; several are compared.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Where to write the page.")] = Path("page.html"),
    verified: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="What `verify --json` printed; again for each further plan in turn."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write plans as one page for a browser: timeline, memory, graph, tables; it needs no network."""
    from placewise.files import load_verification, write_text
    from placewise.report.page import to_page

    if len(verified or []) > len(plans):
        raise InvalidInput(f"--verified: there are more of these ({len(verified or [])}) than plans ({len(plans)})")
    seen = [load_verification(path) for path in verified or []]
    found = [_load(path) for path in plans]
    check_writable(out, read=[*plans, *(verified or [])])  # after them, for a page among the plans has its own words
    for path, facts, plan in zip(verified or [], seen, found, strict=False):
        if facts["plan"] != plan.digest:
            raise InvalidInput(f"--verified {path}: this is of another plan; verify this one")
    titles = [path.name.removesuffix(".gz").removesuffix(".json") for path in plans]
    if len(set(titles)) < len(titles):
        titles = [str(path) for path in plans]
    with terminal.working("drawing"):
        text = to_page(found, titles, seen)
    write_text(out, text)
    if as_json:
        rows = [{"title": title} | plan_facts(plan) for title, plan in zip(titles, found, strict=True)]
        print(to_json({"page": str(out), "bytes": out.stat().st_size, "plans": rows}), flush=True)
    terminal.say(f"wrote {out}; open it in a browser")


@app.command()
def export(
    plan: PlanFile,
    to: Annotated[
        str,
        typer.Option(
            metavar="ENGINE",
            help="An engine (see `placewise engines`), or trace: Chrome JSON for ui.perfetto.dev.",
            autocompletion=complete_engine,
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="Where to write it; stdout by default.")] = None,
    model: Annotated[
        str | None, typer.Option(help="The model, to be cut up as the plan says, into the folder --out.")
    ] = None,
) -> None:
    """Write a plan in the form that another program reads: its config alone to stdout."""
    from placewise import engines
    from placewise.engines.cut import describe_cut
    from placewise.files import write_text
    from placewise.report.trace import to_trace

    write = to_trace if to == "trace" else engines.get(to).export
    if out is not None and model is None:
        check_writable(out, read=[plan])
    found = _load(plan)
    if model is not None:
        cut_up = None if to == "trace" else engines.get(to).write
        if cut_up is None:
            known = ", ".join(name for name, engine in engines.available().items() if engine.write)
            raise InvalidInput(f"--model: only for engines that need the model cut up: {known}")
        if out is None:
            raise InvalidInput("--model: name the folder for what is made of it, with --out")
        check_folder(out, ())
        check_apart(out, "--out", [Path(model).parent])  # the files that are made may be called as the model is
        with terminal.heard():
            cut_up(found, model, out)
        terminal.say(f"{engines.written_for(engines.get(to))}\n{describe_cut(found)}\nwrote {out}")
        return
    text = write(found)
    if to != "trace":
        terminal.say(f"{engines.written_for(engines.get(to))}\n{describe_cut(found)}")
    if out is None:
        sys.stdout.write(text)
    else:
        write_text(out, text)
        terminal.say(f"wrote {out}")


@app.command()
def verify(
    plan: PlanFile,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="The model of the plan: bundled, or a file (.pt2, .onnx, OpenVINO's .xml, config.json).",
            autocompletion=complete_model,
        ),
    ],
    engine: Annotated[
        str | None,
        typer.Option(
            help="What runs it; by default PyTorch, or for .onnx and .xml files whoever reads these.",
            autocompletion=complete_engine,
        ),
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PLACE", help="What a device of the plan is to the engine, such as gpu0=cuda:1."),
    ] = None,
    budget: Annotated[str, typer.Option(metavar="TIME", help="How long to measure.")] = "10s",
    within: Annotated[
        float, typer.Option(help="How far the time may be off, as a share of what was predicted.")
    ] = 0.15,
    update: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keep what was measured, and write the cluster that uses it here."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a plan for real: same outputs, each part where it should be, and the predicted time?"""
    from placewise import verify as verification
    from placewise.files import save_profiles
    from placewise.report.table import describe_verification

    if update:
        check_writable(update, "--update", read=[plan, model])
    if not 0 < within < math.inf:
        raise InvalidInput(f"--within {within}: must be a number above zero")
    found = _load(plan)
    keep = None if update is None else lambda cluster: save_profiles(cluster, update)
    with terminal.heard(), terminal.working("verifying") as show:
        seen = verification.verify(
            found, model, engine=engine, devices=pairs(device or [], "--device"), within=within,
            seconds=positive(budget, "--budget"), keep=keep, on_progress=show,
        )  # fmt: skip
    print(to_json(seen.facts()) if as_json else describe_verification(found, seen), flush=True)
    if update:
        terminal.say(f"wrote {update}; plan again with --cluster {update}")
    if not seen.holds:
        raise DoesNotHold(f"{plan}: " + "; ".join(f"{f.claim}: {f.verdict}" for f in seen.findings if f.is_wrong))


@app.command("engines")
def list_engines(as_json: AsJson = False) -> None:
    """List the engines that a plan can be made for and handed to."""
    from placewise import engines
    from placewise.report.table import describe_engines

    known = engines.available()
    rows = [{"engine": name, "exports": found.summary, "for": found.versions} for name, found in known.items()]
    print(to_json({"engines": rows}) if as_json else describe_engines(known))


@app.command()
def planners(
    model: Annotated[
        str | None, typer.Argument(help="Say which planners apply to this model.", autocompletion=complete_model)
    ] = None,
    cluster: Box = None,
    objective: Goal = None,
    as_json: AsJson = False,
) -> None:
    """List the planners, what they minimise, and their options."""
    from placewise.planners import available
    from placewise.report.table import describe_planners

    infos = available()
    problem = None if model is None else problem_of(model, cluster, objective)
    why_not = {} if problem is None else {name: info.why_not(problem) for name, info in infos.items()}
    if not as_json:
        print(describe_planners(infos, why_not))
        return
    rows = []
    for name, info in infos.items():
        options = {key: {"type": kind.__name__, "default": default} for key, (kind, default) in info.options.items()}
        row = {"planner": name, "summary": info.summary, "objectives": sorted(info.objectives), "options": options}
        rows.append(row | ({"applies": why_not[name] is None, "reason": why_not[name]} if why_not else {}))
    print(to_json({"planners": rows}))


@app.command()
def train(
    method: Annotated[str, typer.Argument(metavar="METHOD", help="placeto, colocrl, hierarchical or hsdag.")],
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help="What to learn from; for placeto generated graphs by default.",
            autocompletion=complete_model,
        ),
    ] = None,
    cluster: Annotated[
        list[str] | None,
        typer.Option(
            "--cluster", help="A box for all models, or one for each in turn.", autocompletion=complete_cluster
        ),
    ] = None,
    objective: Goal = None,
    evaluations: Annotated[int, typer.Option(help="Placements to simulate in all.")] = 100_000,
    out: Annotated[Path, typer.Option(help="Where to write the policy.")] = Path("policy.safetensors"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what is in --out.")] = False,
    policy: Annotated[Path | None, typer.Option(metavar="FILE", help="Begin with the weights of this policy.")] = None,
    logs: Annotated[Path | None, typer.Option(metavar="DIR", help="Logs for TensorBoard.")] = None,
    seed: Seed = 0,
    option: Annotated[
        list[str] | None, typer.Option("-o", metavar="KEY=VALUE", help="An option of the planner.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a policy; it is written every few seconds, and --resume goes on where it was ended."""
    from dataclasses import asdict

    from placewise import learned, planners

    learned.require()
    from placewise.learned import training
    from placewise.report.table import describe_training

    check_writable(out)
    names, boxes = models or [], cluster or []
    if len(boxes) > 1 and len(boxes) != len(names):
        raise InvalidInput(f"--cluster: {len(boxes)} boxes for {len(names)} models; name one, or one for each")
    if boxes and not names:
        raise InvalidInput("--cluster: there is no model to place on it")
    problems = [
        problem_of(name, box, objective)
        for name, box in zip(names, boxes if len(boxes) > 1 else [*boxes, None][:1] * len(names), strict=True)
    ]
    options = planners.parse_options(training.checked(method), option or [])
    with terminal.learning() as show:
        found = training.train(
            method, problems, out, evaluations=evaluations, seed=seed, resume=resume, policy=policy, logs=logs,
            options=options, on_progress=show,
        )  # fmt: skip
    facts = asdict(found) | {"method": method, "policy": str(out)}
    print(to_json(facts) if as_json else describe_training(facts), flush=True)
    terminal.say(f"wrote {out}")
    if not found.finished:
        terminal.stop("--resume goes on from here")


@app.command("import")
def import_model(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A file (.pt2, .onnx, OpenVINO's .xml), or the config.json of a transformers model or its folder.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Where to write the graph; compressed if it ends in .gz.")],
    name: Annotated[str | None, typer.Option(help="What to call the graph; the file's name by default.")] = None,
    training: Annotated[
        Literal["adam", "momentum", "sgd"] | None, typer.Option(help="A whole training step with this optimizer.")
    ] = None,
    prompt: Annotated[int | None, typer.Option(help="Tokens that a transformers model reads; 512 by default.")] = None,
    batch: Annotated[int | None, typer.Option(help="How many prompts or images it reads; 1 by default.")] = None,
    decode: Annotated[
        bool, typer.Option("--decode", help="It writes one token after the prompt, which is in its cache.")
    ] = False,
    dim: Dims = None,
    as_json: AsJson = False,
) -> None:
    """Turn a model of another program into a graph file."""
    from placewise import files
    from placewise.importers.assembly import kinds_without_formula
    from placewise.report.table import describe_import

    check_writable(out, read=[model])
    with terminal.heard():
        graph = files.import_model(
            model, name=name, training=training, prompt=prompt, batch=batch, decode=decode, dims=sizes(dim)
        )
    if unknown := kinds_without_formula(graph):
        terminal.say("costed by their bytes alone: " + ", ".join(f"{kind} ({n})" for kind, n in unknown.most_common()))
    files.save_graph(graph, out)
    print(to_json(graph_facts(graph) | {"graph": str(out)}) if as_json else describe_import(graph_facts(graph)))
    terminal.say(f"wrote {out}")


@app.command()
def profile(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A bundled model, or a model file.", autocompletion=complete_model)
    ],
    device: Annotated[
        str, typer.Option(metavar="DEVICE", help="cpu, cuda:0 (PyTorch), openvino:CPU or onnxruntime.")
    ] = "cpu",
    budget: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Stop after this; what is measured is kept. Run it again to go on."),
    ] = None,
    dim: Dims = None,
    as_json: AsJson = False,
) -> None:
    """Measure each op of a model on this machine, and the whole."""
    from placewise import measure
    from placewise.report.table import describe_profile

    limit = math.inf if budget is None else quantity(budget, "seconds", "--budget")
    try:
        with terminal.heard(), measure.opened(model, device, sizes(dim)) as target:
            with terminal.counting("measuring") as show:
                found = measure.profile(target, seconds=limit, on_progress=show)
            facts = measure.summary(target.graph, found)
    except KeyboardInterrupt:
        terminal.stop("what was measured is kept; run it again to go on")
    print(to_json(facts) if as_json else describe_profile(facts))


@app.command()
def devices(
    out: Annotated[Path | None, typer.Option(help="Where to write it as a cluster file, such as box.yaml.")] = None,
    as_json: AsJson = False,
) -> None:
    """Describe this machine: cores, free memory, GPUs, and the rates that they reach, measured in some seconds."""
    from dataclasses import asdict

    from placewise.files import write_text
    from placewise.machine import describe_machine, to_yaml
    from placewise.report.table import describe_devices

    if out:
        check_writable(out)
    with terminal.heard(), terminal.working("measuring") as say:
        found = describe_machine(say)
    for note in found.notes:
        terminal.note(note)
    print(to_json(asdict(found)) if as_json else describe_devices(found), flush=True)
    if out:
        write_text(out, to_yaml(found, out.stem))
        terminal.say(f"wrote {out}")


@app.command()
def zoo(as_json: AsJson = False) -> None:
    """List the bundled models and boxes."""
    from placewise import zoo as models
    from placewise.files import bundled_boxes, load_cluster
    from placewise.report.table import describe_zoo

    boxes = [load_cluster(name) for name in bundled_boxes()]
    rows = [{"model": name, "summary": models.describe(name), **models.facts(name)} for name in models.names()]
    if not as_json:
        print(describe_zoo(rows, boxes))
        return
    devices = [{"box": box.name, "devices": {d.name: {"memory": d.memory} for d in box.devices}} for box in boxes]
    print(to_json({"models": rows, "boxes": devices}))


# ---- shared by the commands ------------------------------------------------------------------------------------------


def _under(execution: "Execution", found: "Plan") -> "Plan":
    """The plan as another engine would execute it."""
    from dataclasses import replace

    from placewise.simulator import simulate, violations
    from placewise.simulator.bounds import lower_bound

    problem = replace(found.problem, execution=execution)
    broken = violations(problem, found.placement, found.order)
    if broken:
        raise NoFeasiblePlan(f"with these settings the plan does not keep every constraint: {'; '.join(broken)}")
    value = simulate(problem, found.placement, found.order).value
    bound = min(value, lower_bound(problem).value)
    return replace(found, problem=problem, value=value, lower_bound=bound, proved_by="")


def _load(path: Path) -> "Plan":
    from placewise.driver import compiling
    from placewise.files import load_plan

    with compiling(terminal.say_once):
        return load_plan(path)

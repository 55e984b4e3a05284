"""What commands take: a model on a box, a budget, files to write. Names that the shell can complete.

Only what parses is imported here, as in `cli`.
"""

import glob
import os
from collections.abc import Callable, Iterable
from functools import wraps
from inspect import Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from placewise import terminal
from placewise.errors import InvalidInput

if TYPE_CHECKING:
    from placewise.driver import Budget
    from placewise.problem import Execution, Problem


# ---- names that the shell can complete -------------------------------------------------------------------------------


def complete_model(incomplete: str) -> list[str]:
    """Bundled models."""
    from placewise import zoo

    return _starting_with(incomplete, zoo.names())


def complete_cluster(incomplete: str) -> list[str]:
    """Bundled boxes."""
    from placewise.files import bundled_boxes

    return _starting_with(incomplete, bundled_boxes())


def _starting_with(incomplete: str, names: list[str]) -> list[str]:
    """Bundled names and files."""
    return [*(name for name in names if name.startswith(incomplete)), *glob.glob(glob.escape(incomplete) + "*")]


def complete_planner(incomplete: str) -> list[str]:
    """Registered planners."""
    from placewise import planners

    return [name for name in planners.available() if name.startswith(incomplete)]


def complete_engine(incomplete: str) -> list[str]:
    """Registered engines."""
    from placewise import engines

    return [name for name in (*engines.available(), "trace") if name.startswith(incomplete)]


#: Of the best plan of a comparison, in its folder.
BEST_FILES = ("plan.json", "trace.json")


# ---- what to plan ----------------------------------------------------------------------------------------------------

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A bundled model, a model file (.pt2, .onnx, OpenVINO's .xml, config.json), or a graph or problem file.",
        autocompletion=complete_model,
    ),
]
Models = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL...",
        help="As for `plan`; several are compared one after the other.",
        autocompletion=complete_model,
    ),
]
Box = Annotated[
    str | None,
    typer.Option(
        "--cluster", help="A cluster file (YAML) or the name of a bundled box.", autocompletion=complete_cluster
    ),
]
Goal = Annotated[
    Literal["latency", "throughput", "completion"] | None,
    typer.Option("--objective", help="What to minimise; latency by default."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--execution", metavar="KEY=VALUE", help="How the engine executes, such as concurrency=slots,memory=static."
    ),
]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
Dims = Annotated[
    list[str] | None,
    typer.Option("--dim", metavar="NAME=SIZE", help="A size that an ONNX or OpenVINO file leaves open, such as x.0=8."),
]


def problem_of(
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
    colocate_backward: Annotated[
        bool, typer.Option("--colocate-backward", help="A backward op shares the device of its forward op.")
    ] = False,
    execution: Settings = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="Only what this engine can be told, executed as it does; see `placewise engines`.",
            autocompletion=complete_engine,
        ),
    ] = None,
) -> "Problem":
    """The problem that the options describe; what is not given is as the file has it."""
    from dataclasses import replace

    from placewise import engines
    from placewise.files import load_problem

    limits = pairs(max_memory.split(",") if max_memory else [], "--max-memory")
    told = engines.get(engine) if engine is not None else None
    with terminal.heard():
        problem = load_problem(
            model,
            cluster,
            objective=objective,
            pins=pairs(pin, "--pin") if pin else None,
            forbidden=tuple(forbid) if forbid else None,
            contiguous=contiguous or None,
            max_devices=max_devices,
            max_memory={
                device: quantity(limit, "bytes", f"--max-memory {device}={limit}") for device, limit in limits.items()
            },
            place_parameters=place_parameters or (told is not None and told.places_parameters),
            colocate_backward=colocate_backward,
        )
    if told is not None:
        problem = told.fit(problem)
    return replace(problem, execution=execution_of(problem.execution, execution)) if execution else problem


def execution_of(found: "Execution", given: list[str]) -> "Execution":
    """How the engine executes, with the settings that are given replaced."""
    from dataclasses import fields, replace
    from typing import get_type_hints

    from placewise.planners import parse_value

    settings = pairs([pair for text in given for pair in text.split(",")], "--execution")
    kinds = get_type_hints(type(found))
    known = [field.name for field in fields(found)]
    for name in settings:
        if name not in known:
            raise InvalidInput(f"--execution {name}: there is no such setting; there are {', '.join(known)}")
    values: dict[str, Any] = {
        name: parse_value(text, kinds[name], f"--execution {name}") for name, text in settings.items()
    }
    return replace(found, **values)


def pairs(texts: list[str], option: str) -> dict[str, str]:
    """NAME=VALUE texts, split at the last sign, for op names may contain one, and may even be empty."""
    found: dict[str, str] = {}
    for text in texts:
        name, sign, value = text.rpartition("=")
        if not (sign and value):
            raise InvalidInput(f"{option} {text!r}: write it like NAME=VALUE")
        if name in found:
            raise InvalidInput(f"{option}: {name!r} is given twice: {found[name]} and {value}")
        found[name] = value
    return found


def sizes(given: list[str] | None) -> dict[str, int]:
    """The sizes of dimensions by name."""
    sizes = pairs(given or [], "--dim")
    for name, size in sizes.items():
        if not (size.isascii() and size.isdigit() and 0 < int(size[:12]) < 2**31):
            raise InvalidInput(f"--dim {name:.60}={size:.60}: must be a whole number above zero, and below 2^31")
    return {name: int(size) for name, size in sizes.items()}


def quantity(text: str, dimension: str, where: str) -> float:
    """A number with a unit."""
    from placewise.quantities import parse_quantity

    try:
        return parse_quantity(text, dimension)
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error}") from None


def takes_problem(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of `problem_of` in place of its first parameter, the problem that they describe.

    A first parameter called `problems` stands for as many as there are models.
    """
    shared = dict(signature(problem_of).parameters)
    first, *rest = signature(command).parameters.values()
    own = {parameter.name: parameter for parameter in rest}
    if first.name == "problems":
        shared["model"] = shared["model"].replace(annotation=Models)

    @wraps(command)
    def run(**given: Any) -> None:
        options = {name: given.pop(name) for name in shared}
        models = options.pop("model")
        models = [models] if isinstance(models, str) else models
        _check_outputs(given, [*models, options["cluster"]])
        problems = [problem_of(model, **options) for model in models]
        devices = (device for problem in problems for device in problem.cluster.devices)
        _check_outputs(given, [device.profile.file for device in devices if device.profile])
        command(problems if first.name == "problems" else problems[0], **given)

    run.__signature__ = Signature([*shared.values(), *own.values()])  # type: ignore[attr-defined]
    run.__annotations__ = {name: parameter.annotation for name, parameter in {**shared, **own}.items()}
    return run


def _check_outputs(given: dict[str, Any], read: list[str | Path | None]) -> None:
    """What --out and --plot name is not read, and neither are the files that go into a folder --out."""
    for name in ("out", "plot"):
        path = given.get(name)
        for file in (path, *(path / inside for inside in BEST_FILES)) if path else ():
            check_apart(file, f"--{name}", read)


# ---- how long, and where to ------------------------------------------------------------------------------------------

BudgetText = Annotated[
    str | None,
    typer.Option(
        "--budget", metavar="TIME", help="Time for each planner, such as 5min; 10s unless --evaluations is given."
    ),
]
Evaluations = Annotated[int | None, typer.Option(help="Placements that each planner may simulate.")]
Seed = Annotated[int, typer.Option(help="With a budget in evaluations, the same seed gives the same plan.")]


def positive(text: str, option: str) -> float:
    """Seconds, above zero."""
    seconds = quantity(text, "seconds", option)
    if seconds <= 0:
        raise InvalidInput(f"{option}: it must be above zero")
    return seconds


def budget_of(seconds: str | None, evaluations: int | None) -> "Budget":
    """What `--budget` and `--evaluations` allow."""
    from placewise.driver import DEFAULT_BUDGET, Budget

    if seconds is None and evaluations is None:
        return DEFAULT_BUDGET
    limit = None if seconds is None else quantity(seconds, "seconds", "--budget")
    for option, given in (("--budget", limit), ("--evaluations", evaluations)):
        if given is not None and given <= 0:
            raise InvalidInput(f"{option}: it must be above zero")
    return Budget(seconds=limit, evaluations=evaluations)


def check_writable(path: Path, option: str = "--out", *, read: Iterable[str | Path | None] = ()) -> None:
    """Better told now than after the budget is spent."""
    if str(path) == "-":
        raise InvalidInput(f"{option} -: name a file")
    if not path.parent.is_dir():
        raise InvalidInput(f"{option} {path}: there is no folder {path.parent}")
    if path.exists() and not path.is_file():
        raise InvalidInput(f"{option} {path}: it is {'a folder' if path.is_dir() else 'no regular file'}")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise InvalidInput(f"{option} {path}: you may not write to the folder {path.parent}")
    check_apart(path, option, read)


def check_folder(path: Path, files: Iterable[str]) -> None:
    """The folder itself may be missing, but not the one around it."""
    if path.suffix in (".json", ".gz") or str(path) == "-":
        raise InvalidInput(f"--out {path}: name a folder")
    if path.exists() and not path.is_dir():
        raise InvalidInput(f"--out {path}: it is no folder")
    for name in files if path.exists() else ():
        check_writable(path / name)
    if not path.exists():
        check_writable(path)


def check_apart(path: Path | None, option: str, read: Iterable[str | Path | None]) -> None:
    """What a command reads, or the folder that it is in, is not overwritten by what the command writes."""
    for given in read:
        if path and given and path.exists() and os.path.exists(given) and path.samefile(given):
            what = "holds what is read, which could" if path.is_dir() else "is what is read, which would"
            raise InvalidInput(f"{option} {path}: this {what} be overwritten")

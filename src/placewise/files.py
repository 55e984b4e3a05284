"""Graphs, problems and plans as JSON files, clusters as YAML files; reading trusts nothing, writing is all or nothing.

JSON files say what they are ("placewise-graph/1") and hold one list per property, so that 100,000 ops load in a moment.
Numbers are in SI units and come back exactly; null stands for unlimited, and for the time of an op on a device that
cannot run it. Every file may be compressed by gzip. Every error begins with the file's name.
"""

from __future__ import annotations

import difflib
import errno
import gzip
import hashlib
import json
import math
import os
import secrets
import stat
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from importlib import import_module, resources
from io import BufferedReader
from itertools import chain, islice, pairwise, permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from placewise.cluster import Cluster, Device, Link
from placewise.costs import LABELS, Costs
from placewise.errors import InvalidInput, PlacewiseError, check_length, check_type, listed, naming
from placewise.graph import OP_DEFAULTS, PHASES, Graph
from placewise.plans import Plan
from placewise.problem import Execution, Problem
from placewise.profiles import ModelTime, OpTime, Profile
from placewise.quantities import format_bytes

if TYPE_CHECKING:
    from placewise._schemas import ClusterData, CostsData, GraphData, ProblemData
    from placewise.transforms import Contraction

#: How much a file may hold once decompressed; what is larger is refused before it fills the memory, and not written.
MAX_BYTES = 512 * 1024**2
#: Numbers, texts, lists and objects of a JSON file: each takes up to a hundred bytes once read, even if it is "[]".
MAX_VALUES = 20_000_000
MAX_YAML_BYTES = 1024**2
MAX_YAML_DEPTH = 32
#: The machine will not write, though the request makes sense: it is full, say, or does not let this user.
_REFUSALS: Final = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EACCES, errno.EPERM, errno.EROFS}
)

#: The columns of "ops" in a file, and the fields of `Graph` that they are.
_OP_COLUMNS: Final = {
    "name": "op_names",
    "kind": "op_kinds",
    "dtype": "op_dtypes",
    "module": "op_modules",
    "signature": "op_signatures",
} | {name: name for name in ("flops", "bytes_accessed", "scratch", "resident", "phase", "model", "group")}

#: Models as other programs write them: the suffix of the file, and the module whose `load` reads it.
_MODEL_FILES: Final = {
    ".onnx": "placewise.importers.onnx",
    ".xml": "placewise.importers.openvino",
    ".pt2": "placewise.importers.pt2",
}


# ---- whatever the user names as a model ------------------------------------------------------------------------------


def load_problem(
    model: str | Path,
    cluster: str | Path | Cluster | None = None,
    *,
    objective: str | None = None,
    execution: Execution | None = None,
    pins: Mapping[str, str] | None = None,
    forbidden: Sequence[str] | None = None,
    contiguous: bool | None = None,
    max_devices: int | None = None,
    max_memory: Mapping[str, float] | None = None,
    place_parameters: bool = False,
    colocate_backward: bool = False,
) -> Problem:
    """A problem from a problem file, a benchmark file, or a model (a graph file or a bundled name) on a cluster.

    Options replace what the file says. Parameters live with their consumers unless `place_parameters` is set. With
    `colocate_backward`, a backward op shares the device of the forward op whose gradient it computes.
    """
    from placewise import zoo

    for name, value in (("pins", pins), ("max_memory", max_memory)):
        check_type({} if value is None else value, Mapping, name)
    if model in zoo.names():
        found: Graph | Problem = zoo.load(str(model))
    else:
        found = _load_graph_or_problem(existing(model, "model", zoo.names()))

    if isinstance(found, Graph):
        if cluster is None:
            raise InvalidInput(f"{model}: needs a cluster: a YAML file, or one of {', '.join(bundled_boxes())}")
        if not place_parameters:
            folded = found.collapse_parameters()
            _check_pins_of_folded(found, folded, pins or {})
            found = folded.graph
        if isinstance(cluster, Cluster):
            found = Problem(found, cluster)
        else:
            box = load_cluster(cluster)
            with naming(cluster):  # the cluster may lack a rate that the model needs
                found = Problem(found, box)
    elif cluster is not None:
        raise InvalidInput(f"{model}: already has a cluster: leave the other one out")
    elif place_parameters and not found.graph.is_stored.any():
        raise InvalidInput(
            f"{model}: is a problem without ops for weights, and weights are to be placed apart (--place-parameters, "
            "or an engine that does so): give the model instead"
        )

    changes: dict[str, Any] = {
        "objective": objective, "execution": execution, "pins": pins, "contiguous": contiguous,
        "forbidden": forbidden, "max_devices": max_devices,
        "cluster": None if max_memory is None else found.cluster.with_memory(max_memory),
    }  # fmt: skip
    found = replace(found, **{name: value for name, value in changes.items() if value is not None})
    if colocate_backward:
        from placewise import colocation  # compiles

        if place_parameters:
            raise InvalidInput(
                f"{model}: --colocate-backward puts weights with the ops that read them, and --place-parameters (or "
                "the engine) places them apart: leave one out"
            )
        return colocation.colocate_backward(found)
    return found


def _check_pins_of_folded(graph: Graph, folded: Contraction, pins: Mapping[str, str]) -> None:
    """Say where a pinned parameter went, instead of that there is no such op."""
    for name in pins.keys() & set(graph.op_names) - set(folded.graph.op_names):
        owner = folded.graph.op_names[folded.label[graph.op_index(name)]]
        raise InvalidInput(
            f"{name!r:.60} is a parameter of {owner!r:.60} and lives with it; pin that op, or place parameters"
        )


def _load_graph_or_problem(path: Path, **options: Any) -> Graph | Problem:
    """By its suffix, by what the file says it is, or by its keys where it is of a format that does not say."""
    if path.suffix.lower() in _MODEL_FILES:
        return cast(Graph, import_module(_MODEL_FILES[path.suffix.lower()]).load(path, **options))
    if is_config(path):
        from placewise.importers.transformers import from_transformers

        return from_transformers(path)
    with naming(path):
        data = _read_json(path)
        keys = data.keys() if isinstance(data, dict) else set()
        name = path.name.removesuffix(".gz").removesuffix(".json")
        if "format" in keys and data["format"] == "placement-instance/1":
            from placewise.importers import instances

            return instances.load(data, name)
        if {"maxSizePerFPGA", "maxFPGAs", "nodes", "edges"} <= keys:
            from placewise.importers import dnn_partitioning

            return dnn_partitioning.load(data, name)
        kind, content = _unwrapped(data, "graph", "problem")
        return _graph_in(content) if kind == "graph" else _problem_in(content)


def import_model(
    model: str | Path,
    *,
    name: str | None = None,
    training: str | None = None,
    prompt: int | None = None,
    batch: int | None = None,
    decode: bool = False,
    dims: Mapping[str, int] | None = None,
) -> Graph:
    """The graph of a model that another program has written; `training` is the name of an optimizer.

    Prompt, batch and decode are for the configurations of transformers; other files have their sizes in them, except
    those that an ONNX or OpenVINO file leaves open, which `dims` gives.
    """
    path = existing(model, "model", ())
    sizes = {key: value for key, value in (("prompt", prompt), ("batch", batch)) if value is not None}
    if dims and path.suffix.lower() not in (".onnx", ".xml"):
        raise InvalidInput(f"{model}: only .onnx and .xml files have sizes that are left open")
    if is_config(path):
        from placewise.importers.transformers import from_transformers

        return from_transformers(path, **sizes, decode=decode, training=training, name=name)
    if sizes or decode:
        raise InvalidInput(f"{model}: its sizes are in the file; only a transformers model (its config.json, or the "
                           "folder with it) takes --prompt, --batch, --decode")  # fmt: skip
    found = _load_graph_or_problem(path, **({"dims": dims} if dims else {}))
    if isinstance(found, Problem):
        raise InvalidInput(f"{model}: is a whole problem, a model is expected")
    graph = replace(found, name=name, models=(name,)) if name and len(found.models) == 1 else found
    if training is None:
        return graph
    from placewise.importers.training import mirrored

    return mirrored(graph, training)


def is_config(path: Path) -> bool:
    """Whether this is the configuration of a transformers model, or a folder that should hold one."""
    return path.is_dir() or path.name == "config.json"


def existing(path: str | Path, what: str, bundled: Sequence[str]) -> Path:
    """The path, if there is such a file; else an error that has a guess at what was meant."""
    if not isinstance(path, (str, os.PathLike)):
        raise InvalidInput(f"{path!r:.60}: must be the name of a file or of a bundled {what}")
    if os.path.exists(path):
        return Path(path)
    close = difflib.get_close_matches(str(path), bundled, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    if not bundled:
        raise InvalidInput(f"{path}: there is no such file")
    raise InvalidInput(f"{path}: neither a file nor a bundled {what}{hint}; bundled are {', '.join(bundled)}")


# ---- problems --------------------------------------------------------------------------------------------------------


def load_problem_file(path: str | Path) -> Problem:
    """Read a problem file; `load_problem` reads all that a problem can be made from."""
    with naming(path):
        return _problem_in(_unwrapped(_read_json(path), "problem")[1])


def save_problem(problem: Problem, path: str | Path) -> None:
    """Write a problem file (gzip if the name ends in .gz)."""
    _write_json(path, "problem", _problem_out(problem))


def _problem_in(content: Any) -> Problem:
    from placewise._schemas import ProblemData, validated

    return _build_problem(validated(ProblemData, content))


def _build_problem(data: ProblemData) -> Problem:
    graph, cluster, limits = _build_graph(data.graph), _build_cluster(data.cluster), data.constraints
    return Problem(
        graph,
        cluster,
        cast(Costs, data.costs and _build_costs(data.costs, graph.num_ops, cluster.device_names)),
        data.objective,
        Execution(**data.execution.model_dump()),
        pins=limits.pins,
        forbidden=tuple(limits.forbidden),
        contiguous=limits.contiguous,
        max_devices=limits.max_devices,
    )


def _problem_out(problem: Problem) -> dict[str, Any]:
    return {
        "graph": _graph_out(problem.graph),
        "cluster": _cluster_out(problem.cluster),
        "costs": _costs_out(problem.costs, problem.cluster.device_names),
        "objective": problem.objective,
        "execution": asdict(problem.execution),
        "constraints": {
            "pins": dict(problem.pins),
            "forbidden": list(problem.forbidden),
            "contiguous": problem.contiguous,
            "max_devices": problem.max_devices,
        },
    }


def _build_costs(data: CostsData, ops: int, devices: Sequence[str]) -> Costs:
    columns = {"costs.seconds": data.seconds} | ({"costs.labels": data.labels} if data.labels is not None else {})
    for where, table in columns.items():
        if table.keys() != set(devices):
            raise InvalidInput(f"{where}: must have a list for each device: {listed(devices)}")
        for device, column in table.items():
            check_length(column, ops, f"{where}.{device:.60}")
    seconds = np.array([data.seconds[device] for device in devices], np.float64).T
    seconds[np.isnan(seconds)] = math.inf  # null has become NaN
    if data.labels is None:
        return Costs.create(seconds, data.label)
    return Costs.create(seconds, np.array([[LABELS.index(x) for x in data.labels[d]] for d in devices]).T)


def _costs_out(costs: Costs, devices: Sequence[str]) -> dict[str, Any]:
    seconds = {
        device: [x if x < math.inf else None for x in costs.seconds[:, d].tolist()] for d, device in enumerate(devices)
    }
    if len(costs.shares()) <= 1:
        return {"seconds": seconds, "label": next(iter(costs.shares()), "given")}
    return {
        "seconds": seconds,
        "labels": {device: [LABELS[x] for x in costs.label[:, d].tolist()] for d, device in enumerate(devices)},
    }


# ---- graphs ----------------------------------------------------------------------------------------------------------


def load_graph(path: str | Path) -> Graph:
    """Read a graph file."""
    with naming(path):
        return _graph_in(_unwrapped(_read_json(path), "graph")[1])


def save_graph(graph: Graph, path: str | Path) -> None:
    """Write a graph file (gzip if the name ends in .gz)."""
    _write_json(path, "graph", _graph_out(graph))


def _graph_in(content: Any) -> Graph:
    from placewise._schemas import GraphData, validated

    return _build_graph(validated(GraphData, content))


def _build_graph(data: GraphData) -> Graph:
    ops, tensors = data.ops, data.tensors
    columns = {field: getattr(ops, column) for column, field in _OP_COLUMNS.items()}
    columns["phase"] = ops.phase and [PHASES.index(phase) for phase in ops.phase]
    check_length(tensors.consumers, len(tensors.producer), "tensors.consumers")
    for t, readers in enumerate(tensors.consumers):
        if readers and max(readers) >= len(ops.name):
            raise InvalidInput(f"tensors.consumers[{t}]: there is no op {max(readers)}: there are {len(ops.name)} ops")
    return Graph.create(
        name=data.name,
        models=data.models,
        **{field: values for field, values in columns.items() if values is not None},
        tensor_producer=tensors.producer,
        tensor_bytes=tensors.bytes,
        edge_tensor=np.repeat(np.arange(len(tensors.consumers)), [len(readers) for readers in tensors.consumers]),
        edge_consumer=list(chain.from_iterable(tensors.consumers)),
    )


def _graph_out(graph: Graph) -> dict[str, Any]:
    ops: dict[str, Any] = {}
    for column, field in _OP_COLUMNS.items():
        values = getattr(graph, field)
        values = values.tolist() if isinstance(values, np.ndarray) else list(values)
        if field not in OP_DEFAULTS or values.count(OP_DEFAULTS[field]) < graph.num_ops:
            ops[column] = [PHASES[x] for x in values] if field == "phase" else values
    readers, start = graph.consumers.tolist(), graph.consumer_ptr.tolist()
    return {
        "name": graph.name,
        "models": list(graph.models),
        "ops": ops,
        "tensors": {
            "producer": graph.tensor_producer.tolist(),
            "bytes": graph.tensor_bytes.tolist(),
            "consumers": [readers[first:end] for first, end in pairwise(start)],
        },
    }


# ---- clusters --------------------------------------------------------------------------------------------------------


def bundled_boxes() -> list[str]:
    """The names of the clusters that come with Placewise."""
    boxes = resources.files("placewise") / "boxes"
    return sorted(file.name.removesuffix(".yaml") for file in boxes.iterdir() if file.name.endswith(".yaml"))


def load_cluster(path: str | Path) -> Cluster:
    """Read a cluster file, or a bundled box by its name."""
    bundled = bundled_boxes()
    if path in bundled:
        with resources.as_file(resources.files("placewise") / "boxes" / f"{path}.yaml") as file:
            return load_cluster(file)
    file = existing(path, "cluster", bundled)
    with naming(path):
        from placewise._schemas import ClusterData, validated

        return _build_cluster(validated(ClusterData, _read_yaml(file)), file.parent)


def save_cluster(cluster: Cluster, path: str | Path) -> None:
    """Write a cluster file: numbers in SI units, one entry per direction of a link."""
    import yaml

    content = _cluster_out(cluster)
    for written, device in zip(content["devices"], cluster.devices, strict=True):
        if device.profile:  # a problem does without: it has the costs
            written["profile"] = device.profile.name
    text = yaml.dump(content, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), sort_keys=False)
    with naming(path):
        if len(text) > MAX_YAML_BYTES:
            raise InvalidInput("the cluster is too large for a cluster file; save a problem with it instead")
    write_text(path, text)


def save_profiles(cluster: Cluster, path: str | Path) -> None:
    """Have a cluster file name the profiles of its devices; the rest of it, comments too, stays as it is.

    A file that is not there, or is of another cluster, is written whole.
    """
    with suppress(InvalidInput, OSError):
        if _cluster_out(load_cluster(path)) == _cluster_out(cluster):
            text = _with_profiles(_read_text(path, MAX_YAML_BYTES), [device.profile for device in cluster.devices])
            if text is not None:
                write_text(path, text)
                return
    save_cluster(cluster, path)


def _with_profiles(text: str, profiles: Sequence[Profile | None]) -> str | None:
    """The text of a cluster file with a profile at each device that has one; None if it would not say so."""
    import yaml

    (entries,) = [value for key, value in yaml.compose(text, yaml.SafeLoader).value if key.value == "devices"]
    edits: list[tuple[int, int, str]] = []
    for entry, profile in zip(entries.value, profiles, strict=True):
        given = {key.value: (key, value) for key, value in entry.value}
        if profile is None or "name" not in given:
            continue
        if "profile" in given:
            old = given["profile"][1]
            edits.append((old.start_mark.index, old.end_mark.index, profile.name))
        elif entry.flow_style:
            end = given["name"][1].end_mark.index
            edits.append((end, end, f", profile: {profile.name}"))
        else:
            end = text.find("\n", given["name"][1].end_mark.index)
            end = len(text) if end < 0 else end
            edits.append((end, end, f"\n{' ' * given['name'][0].start_mark.column}profile: {profile.name}"))
    for begin, end, inserted in sorted(edits, reverse=True):
        text = text[:begin] + inserted + text[end:]
    told = [entry.get("profile") for entry in yaml.safe_load(text)["devices"]]
    return text if told == [profile and profile.name for profile in profiles] else None


def _build_cluster(data: ClusterData, folder: Path = Path()) -> Cluster:
    links: list[Link] = []
    most = len(data.devices) * (len(data.devices) - 1)
    rest = [entry for entry in data.links if entry.between == "all"]
    if len(rest) > 1:
        raise InvalidInput("links: only one entry can be between all, for the pairs that no other entry gives")
    for entry in [entry for entry in data.links if entry.between != "all"] + rest:
        if entry.between == "all":
            given = {(link.source, link.target) for link in links}
            pairs = [pair for pair in permutations([device.name for device in data.devices], 2) if pair not in given]
        else:
            pairs = list(islice(entry.pairs, most + 1))
        links += [Link(*pair, entry.bandwidth, entry.latency, entry.channels(*pair)) for pair in pairs]
        if len(links) > most:  # one is wrong, and `Cluster` says which
            break
    devices = tuple(
        Device(**device.model_dump() | {"profile": load_profile(device.profile, folder) if device.profile else None})
        for device in data.devices
    )
    return Cluster(devices, tuple(links), data.name)


def _cluster_out(cluster: Cluster) -> dict[str, Any]:
    def plain(rate: float) -> float | None:
        return float(rate) if math.isfinite(rate) else None

    devices = [
        {
            "name": device.name,
            "kind": device.kind,
            "memory": plain(device.memory),
            "flops": {dtype: plain(rate) for dtype, rate in device.flops.items()},
            "bandwidth": plain(device.bandwidth),
            "launch": float(device.launch),
            "copies": device.copies,
        }
        | ({"shards": device.shards} if device.shards > 1 else {})
        for device in cluster.devices
    ]
    links = [
        {"from": link.source, "to": link.target, "bandwidth": plain(link.bandwidth), "latency": float(link.latency)}
        | ({"via": list(link.via)} if link.via else {})
        for link in cluster.links
    ]
    return {"name": cluster.name, "devices": devices, "links": links}


# ---- profiles --------------------------------------------------------------------------------------------------------


def profile_folder() -> Path:
    """Where measurements on this machine are kept."""
    given = os.environ.get("PLACEWISE_PROFILES")
    return (
        Path(given) if given else Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser() / "placewise"
    )


def known_profiles() -> dict[str, Path]:
    """Profiles by name: those that come with Placewise, and before them those measured on this machine."""
    shipped = Path(str(resources.files("placewise"))) / "costs" / "measured"
    return {
        file.name.removesuffix(".json.gz"): file
        for folder in (shipped, profile_folder())
        for file in sorted(folder.glob("*.json.gz"))
    }


def load_profile(name: str | Path, folder: Path = Path()) -> Profile:
    """Read a profile by its name, or a profile file: from a folder, if it is there."""
    known, near = known_profiles(), folder / name
    file = known.get(str(name)) or existing(near if os.path.exists(near) else name, "profile", list(known))
    with naming(file):
        from placewise._schemas import ProfileData, validated

        data = validated(ProfileData, _unwrapped(_read_json(file), "profile")[1])
        for kind, columns in (("ops", data.ops), ("models", data.models)):
            for column, values in columns:
                check_length(values, len(next(iter(columns))[1]), f"{kind}.{column}")
        ops, models = ([values for _, values in columns] for columns in (data.ops, data.models))
        return Profile(
            data.name, data.device, data.hardware, data.library, data.date,
            {signature: OpTime(*time) for signature, *time in zip(*ops, strict=True)},
            {name: ModelTime(*time) for name, *time in zip(*models, strict=True)},
            file,
        )  # fmt: skip


def save_profile(profile: Profile, path: str | Path) -> None:
    """Write a profile file."""
    ops = {"signature": list(profile.ops)} | _as_columns(OpTime, profile.ops.values())
    models = {"name": list(profile.models)} | _as_columns(ModelTime, profile.models.values())
    about = {key: getattr(profile, key) for key in ("name", "device", "hardware", "library", "date")}
    _write_json(path, "profile", about | {"ops": ops, "models": models})


def _as_columns(kind: type[OpTime] | type[ModelTime], rows: Iterable[Any]) -> dict[str, list[Any]]:
    listed_rows = list(rows)
    return {name: [row[i] for row in listed_rows] for i, name in enumerate(kind._fields)}


# ---- plans -----------------------------------------------------------------------------------------------------------


def load_plan(path: str | Path) -> Plan:
    """Read a plan file, check that the plan keeps every constraint, and simulate it anew.

    The value is proved by that. The lower bound is what the planner proved when it planned: it is only checked to be
    unedited (by a digest) and no larger than the value.
    """
    with naming(path):
        if Path(path).suffix.lower() in (".html", ".htm"):
            raise InvalidInput("a page, not a plan; name the plan that it is made from (a page to write goes after -o)")
        return _plan_in(_unwrapped(_read_json(path), "plan")[1])


def load_verification(path: str | Path) -> dict[str, Any]:
    """Read what `placewise verify --json` printed (`verify.Verification.facts`)."""
    with naming(path):
        from placewise._schemas import VerificationData, validated

        return validated(VerificationData, _read_json(path)).model_dump()


def load_split(path: str | Path) -> dict[str, Any]:
    """Read the manifest of a model that was cut up (`placewise export --to onnxruntime-split --model`)."""
    with naming(path):
        from placewise._schemas import SplitData, validated

        return validated(SplitData, _read_json(path)).model_dump()


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan file with its problem inside, so that it can be checked and used alone (gzip if named .gz)."""
    names = plan.problem.cluster.device_names
    answer: dict[str, Any] = {
        "devices": [names[device] for device in plan.placement.tolist()],
        "order": None if plan.order is None else plan.order.tolist(),
        "value": float(plan.value),
        "lower_bound": float(plan.lower_bound),
    }
    content = {
        "planner": plan.planner,
        "found_by": plan.found_by,
        "proved_by": plan.proved_by,
        "version": plan.version,
        "seed": plan.seed,
        "options": dict(plan.options),
        "seconds": plan.seconds,
        "evaluations": plan.evaluations,
        "stopped": plan.stopped,
        "history": plan.history,
        "bounds": plan.bounds,
        **answer,
        "digests": _digests(plan.problem) | {"answer": _digest_of(**answer)},
        "problem": _problem_out(plan.problem),
    }
    _write_json(path, "plan", content)


def _plan_in(content: Any) -> Plan:
    from placewise._schemas import PlanData, validated
    from placewise.simulator import evaluate, violations

    data = validated(PlanData, content)
    problem = _build_problem(data.problem)
    for part, digest in _digests(problem).items():
        if getattr(data.digests, part) != digest:
            what = "its problem" if part == "problem" else f"problem.{part}"
            raise InvalidInput(f"{what} was edited after the plan was made: plan the changed problem anew")

    check_length(data.devices, problem.num_ops, "devices")
    number = {name: i for i, name in enumerate(problem.cluster.device_names)}
    for i, name in enumerate(data.devices):
        if name not in number:
            raise InvalidInput(f"devices[{i}]: the cluster has no device {name!r:.60}; it has {listed(list(number))}")
    placement = np.array([number[name] for name in data.devices], np.int32)
    order = None if data.order is None else np.array(data.order, np.int32)
    if order is not None and not np.array_equal(np.sort(order), np.arange(problem.num_ops)):
        raise InvalidInput("order: must hold every op once")

    simulated = evaluate(problem, placement, order)
    if not simulated.feasible[0]:
        broken = "; ".join(violations(problem, placement, order))
        raise InvalidInput(f"the plan breaks its problem's constraints: {broken}")
    value = float(simulated.value[0])
    if not math.isclose(value, data.value, rel_tol=1e-9):
        raise InvalidInput(
            f"the plan was stored with value {data.value}, but simulates to {value}: it was edited, or made by another "
            f"version of Placewise ({data.version:.60}); plan the problem anew"
        )
    if data.lower_bound > data.value * (1 + 1e-9):
        raise InvalidInput(f"lower_bound: must be at most the value, {data.value}, found {data.lower_bound}")
    if data.digests.answer != _digest_of(data.devices, data.order, data.value, data.lower_bound):
        raise InvalidInput("devices, order, value or lower_bound were edited after the plan was made: plan anew")
    return Plan(
        problem=problem,
        placement=placement,
        order=order,
        value=data.value,
        lower_bound=data.lower_bound,
        planner=data.planner,
        found_by=data.found_by,
        proved_by=data.proved_by,
        version=data.version,
        seed=data.seed,
        options=data.options,
        seconds=data.seconds,
        evaluations=data.evaluations,
        stopped=data.stopped,
        history=tuple(data.history),
        bounds=tuple(data.bounds),
    )


def _digests(problem: Problem) -> dict[str, str]:
    return {
        "graph": problem.graph.digest,
        "cluster": problem.cluster.digest,
        "costs": problem.costs.digest,
        "problem": problem.digest,
    }


def _digest_of(devices: list[str], order: list[int] | None, value: float, lower_bound: float) -> str:
    return hashlib.sha256(json.dumps([devices, order, value, lower_bound]).encode()).hexdigest()


# ---- JSON and YAML ---------------------------------------------------------------------------------------------------


def _unwrapped(data: Any, *kinds: str) -> tuple[str, dict[str, Any]]:
    """What the file is and what it holds, if it is one of these kinds and of the version that is read here."""
    expected = " or ".join(f"a {kind}" for kind in kinds)
    if not isinstance(data, dict) or not isinstance(data.get("format"), str):
        raise InvalidInput(f'{expected} is expected: an object with "format": "placewise-{kinds[0]}/1"')
    found = data["format"]
    for kind in ("graph", "problem", "plan", "profile"):
        if found.startswith(f"placewise-{kind}/"):
            if kind not in kinds:
                raise InvalidInput(f"this is a {kind}, {expected} is expected")
            if found != f"placewise-{kind}/1":
                raise InvalidInput(f"{found:.60}: this version reads /1; upgrade placewise")
            return kind, {key: value for key, value in data.items() if key != "format"}
    raise InvalidInput(f"the format {found!r:.60} is unknown; {expected} is expected")


def _read_json(path: str | Path) -> Any:
    def refuse(constant: str) -> None:
        raise InvalidInput(f"{constant} is not a number in JSON; unlimited is written as null")

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise InvalidInput(f"the key {twice!r:.60} is given twice")
        return found

    text = _read_text(path, MAX_BYTES)
    _check_amount(text)
    try:
        return json.loads(text, parse_constant=refuse, object_pairs_hook=without_duplicates)
    except json.JSONDecodeError as error:
        cut_off = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated")
        hint = " (the file ends too early)" if cut_off else ""
        raise InvalidInput(f"not JSON at line {error.lineno}, column {error.colno}: {error.msg}{hint}") from None
    except RecursionError:
        raise InvalidInput("lists or objects are nested too deep") from None
    except ValueError:
        raise InvalidInput("a whole number has too many digits") from None


def _write_json(path: str | Path, kind: str, content: dict[str, Any]) -> None:
    document = {"format": f"placewise-{kind}/1", **content}
    try:
        text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        raw = text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"{path}: cannot be written as JSON: {error}") from None
    with naming(path):  # what could not be read again is not written
        _check_amount(text)
        _check_length(raw, MAX_BYTES)
    write_text(path, text)


def _check_length(raw: bytes, limit: int) -> None:
    """One character beyond ASCII can make every character of a text take four bytes in memory."""
    limit = limit if raw.isascii() else limit // 4
    if len(raw) > limit:
        raise InvalidInput(f"larger than {format_bytes(limit)}")


def _check_amount(text: str) -> None:
    """Before anything is made of it. Counts marks within texts too, of which there are few."""
    if sum(map(text.count, ",[{")) > MAX_VALUES:
        raise InvalidInput(f"holds more than {MAX_VALUES:,} values")


def _read_yaml(path: str | Path) -> Any:
    import yaml

    fast = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class PlainLoader(fast):  # type: ignore[misc, valid-type]
        """No key that replaces another, silently or by a merge."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys: set[str] = set()
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    continue  # refused below
                merges = key.tag == "tag:yaml.org,2002:merge"
                if merges or key.value in keys:
                    problem = "merge keys are not allowed" if merges else f"the key {key.value!r:.60} is given twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                keys.add(key.value)
            return super().construct_mapping(node, deep)

    text = _read_text(path, MAX_YAML_BYTES)
    try:
        # Looked through first: aliases can make a small file expand without end, and depth can exhaust the C stack.
        depth = 0
        for event in yaml.parse(text, Loader=fast):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_YAML_DEPTH:
                raise InvalidInput("lists or mappings are nested too deep")
            if getattr(event, "anchor", None) is not None:
                raise yaml.composer.ComposerError(None, None, "anchors and aliases are not allowed", event.start_mark)
        return yaml.load(text, Loader=PlainLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        what = ", ".join(part for part in (error.context, error.problem) if part)
        raise InvalidInput(f"not a cluster in YAML{place}: {what:.200}") from None
    except (yaml.YAMLError, ValueError) as error:  # a character, a date or a number that cannot be
        raise InvalidInput(f"not a cluster in YAML: {' '.join(str(error).split()):.200}") from None


# ---- bytes -----------------------------------------------------------------------------------------------------------


def _read_text(path: str | Path, limit: int) -> str:
    """The text of a file, plain or compressed, of at most `limit` bytes."""
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size > limit:
                raise InvalidInput(f"larger than {format_bytes(limit)}")
            compressed = file.peek(2)[:2] == b"\x1f\x8b"
            raw = _read_at_most(gzip.GzipFile(fileobj=file) if compressed else file, limit)
        _check_length(raw, limit)
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"not UTF-8 text: byte {error.start} is {raw[error.start]:#04x}") from None
    except (gzip.BadGzipFile, zlib.error, EOFError):
        raise InvalidInput("the gzip data is damaged or ends too early") from None
    except (OSError, TypeError, ValueError) as error:
        raise InvalidInput(f"cannot be read: {_reason(error)}") from None


def _read_at_most(stream: gzip.GzipFile | BufferedReader, limit: int) -> bytes:
    """Piece by piece, so that a small file that decompresses to a huge one stops at the limit."""
    pieces: list[bytes] = []
    left = limit
    while piece := stream.read(1024**2):
        left -= len(piece)
        if left < 0:
            raise InvalidInput(f"larger than {format_bytes(limit)} when decompressed")
        pieces.append(piece)
    return b"".join(pieces)


def write_text(path: str | Path, text: str) -> None:
    """Write a file (gzip if the name ends in .gz). Whatever happens, the file is then the old one or the new one."""
    try:
        raw = text.encode()
    except ValueError as error:
        raise InvalidInput(f"{path}: cannot be written: {_reason(error)}") from None
    if str(path).endswith(".gz"):
        raw = gzip.compress(raw, compresslevel=6, mtime=0)  # without the time, equal content gives equal files
    write_bytes(path, raw)


def write_bytes(path: str | Path, raw: bytes) -> None:
    """Write a file as it is. Whatever happens, the file is then the old one or the new one."""
    try:
        target = Path(os.path.realpath(path))
        if os.path.lexists(target) and not target.is_file() and not target.is_dir():
            raise InvalidInput(f"{path}: not a regular file, so it is left alone")
        temporary = target.with_name(f".{secrets.token_hex(8)}.tmp")
        try:
            with open(temporary, "xb") as file:
                if target.exists():  # and perhaps is nobody else's business
                    os.chmod(temporary, stat.S_IMODE(target.stat().st_mode))
                file.write(raw)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except (OSError, TypeError, ValueError) as error:  # a path may be of the wrong type, or hold a null
        not_the_request = isinstance(error, OSError) and error.errno in _REFUSALS
        kind = PlacewiseError if not_the_request else InvalidInput
        raise kind(f"{path}: cannot be written: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)

"""Saved PyTorch programs (`torch.export.save`, .pt2) as graphs, without PyTorch.

A .pt2 file is a zip archive: the program as JSON, the weights as bytes, and pickles of sample inputs and odd tensors.
`torch.export.load` unpickles those, and evaluates the symbolic sizes that the JSON spells out; either runs whatever the
author of the file put there. Here only the JSON is read, and read as data: weights are known by their types, and a
symbolic size is what it was for the example inputs.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import getitem
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import Field

from placewise._schemas import List, validated
from placewise.errors import InvalidInput, PlacewiseError, Unsupported, naming
from placewise.graph import Graph
from placewise.importers import require
from placewise.importers.aten import Call, Laid, Value, known
from placewise.importers.fields import Record
from placewise.importers.tracing import Recorder, operator_name, written
from placewise.kinds import TensorType
from placewise.quantities import format_bytes

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import GraphModule

#: What the program's JSON may hold; that of a 70B model has 20 MB. Each value takes up to a hundred bytes once read.
MAX_BYTES = 256 * 1024**2
MAX_VALUES = 20_000_000
MAX_RANK = 64
#: Regions within regions.
MAX_DEPTH = 16

#: As torch numbers them in its files.
_DTYPES: Final = {
    1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float16", 7: "float32", 8: "float64",
    10: "complex64", 11: "complex128", 12: "bool", 13: "bfloat16", 28: "uint16", 29: "float8_e4m3fn",
    30: "float8_e5m2", 31: "float8_e4m3fnuz", 32: "float8_e5m2fnuz", 33: "float8_e8m0fnu", 34: "uint32", 35: "uint64",
}  # fmt: skip
_SCHEMA = 8

_Union = dict[str, Any]  # one key, which says what the value is


class _Tensor(Record):
    dtype: int
    sizes: Annotated[List[_Union], Field(max_length=MAX_RANK)]
    strides: Annotated[List[_Union], Field(max_length=MAX_RANK)]


class _Argument(Record):
    name: str
    arg: _Union


class _Node(Record):
    target: str
    inputs: List[_Argument]
    outputs: List[_Union]
    metadata: dict[str, str]


class _Graph(Record):
    inputs: List[_Union]
    outputs: List[_Union]
    nodes: List[_Node]
    tensor_values: dict[str, _Tensor]
    sym_int_values: dict[str, _Union] = Field(default_factory=dict)


class _Signature(Record):
    input_specs: List[_Union]


class _Module(Record):
    graph: _Graph
    signature: _Signature


class _Version(Record):
    major: int


class _Program(Record):
    graph_module: _Module
    schema_version: _Version


def load(path: str | Path, name: str | None = None) -> Graph:
    """The graph of a saved program."""
    with naming(path), _told():
        module, places = _parsed(Path(path))
        return _Reader(module, name or Path(path).name.removesuffix(".pt2"), places).read()


def _parsed(path: Path) -> tuple[_Module, Mapping[str, str]]:
    """The program, and where each weight lies."""
    with zipfile.ZipFile(path) as archive:
        program = validated(_Program, _json(archive, _program_name(archive.namelist())))
        places = _places(archive)
    if program.schema_version.major != _SCHEMA:
        found = program.schema_version.major
        raise Unsupported(f"written in version {found} of torch's format; version {_SCHEMA} is read")
    return program.graph_module, places


@contextmanager
def _told() -> Iterator[None]:
    """Whatever is wrong with a file is the file's fault."""
    try:
        yield
    except PlacewiseError:
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, UnicodeDecodeError) as error:
        raise InvalidInput(f"not a .pt2 archive, or a damaged one: {error}") from None
    except (RecursionError, MemoryError):
        raise
    except OSError as error:
        raise InvalidInput(f"cannot be read: {error.strerror or error}") from None
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise InvalidInput(f"not as torch.export.save writes it: {error!r:.120}") from None


def _program_name(entries: Sequence[str]) -> str:
    """Its name in the archive; files of torch before 2.8 have it at the top."""
    programs = [entry for entry in entries if entry.endswith(".json") and "/models/" in f"/{entry}"]
    programs += [entry for entry in entries if entry.endswith("serialized_exported_program.json")]
    if len(programs) != 1:
        found = "no program" if not programs else f"{len(programs)} programs"
        raise InvalidInput(f"an archive with one exported program is expected, found {found}")
    return programs[0]


def _places(archive: zipfile.ZipFile) -> dict[str, str]:
    """Where in the archive each weight lies: tied weights lie in one place. Older files do not tell."""
    configs = [entry for entry in archive.namelist() if entry.endswith("_weights_config.json")]
    if len(configs) != 1:
        return {}
    config = _json(archive, configs[0])["config"]
    return {str(weight): str(entry["path_name"]) for weight, entry in config.items()}


def _json(archive: zipfile.ZipFile, entry: str) -> Any:
    """Piece by piece, as an archive may claim anything about its sizes."""
    with archive.open(entry) as file:
        raw = file.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise InvalidInput(f"{entry:.60}: larger than {format_bytes(MAX_BYTES)}")
    if sum(map(raw.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise InvalidInput(f"{entry:.60}: holds more than {MAX_VALUES:,} values")
    try:
        return json.loads(raw)
    except ValueError as error:
        raise InvalidInput(f"{entry:.60}: not JSON: {error}") from None


class _Reader(Recorder):
    """Goes through the calls; a tensor's key is its name, within a region together with the region's."""

    def __init__(self, module: _Module, name: str, places: Mapping[str, str]) -> None:
        super().__init__(name)
        self.module, self.places = module, places

    def read(self) -> Graph:
        graph = self.module.graph
        self._inputs(graph)
        self._run(graph, "", 0)
        return self.graph()

    def _inputs(self, graph: _Graph) -> None:
        changed = written(
            (_qualified(node.target), next(_names(node.inputs[0].arg), None), next(_names(node.outputs[0]), None))
            for node in graph.nodes
            if node.inputs and node.outputs
        )
        used = {name for node in graph.nodes for argument in node.inputs for name in _names(argument.arg)}
        first: dict[str, Value] = {}
        for spec in self.module.signature.input_specs:
            ((role, content),) = spec.items()
            if role in ("token", "constant_input"):
                continue
            names = list(_names(content["arg"])) if role == "user_input" else [str(content["arg"]["name"])]
            if not names or names[0] not in graph.tensor_values:
                continue  # a number, or an object that is no tensor
            (name,) = names
            laid = self._laid(graph, name)
            if role == "user_input":
                self.given(name, name, "input", laid)
                continue
            path = str(content[_PATHS[role]])
            if role == "buffer" and name not in used:
                continue  # the module has it, but the work does not need it
            if role == "tensor_constant" and not laid.type.elements:
                self.empty(name, laid)
                continue
            place = self.places.get(path, "") if role == "parameter" else ""
            if place in first:
                self.keep(name, first[place])
                continue
            kind = "state" if name in changed else "parameter"
            value = self.given(name, path, kind, laid, module=path.rpartition(".")[0])
            if place:
                first[place] = value

    def _run(self, graph: _Graph, region: str, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise InvalidInput("regions are nested too deep")
        for number, node in enumerate(graph.nodes):
            if node.target.startswith("torch.ops.higher_order."):
                self._inline(graph, node, region, f"{region}{number}/", depth)
                continue
            entries = [entry for output in node.outputs for entry in _entries(output)]
            names = [entry for entry in entries if entry is not None]
            if not names:  # an assertion, or a number
                continue
            operator, writes = operator_name(_qualified(node.target))
            given = {argument.name: self._resolved(graph, argument.arg, region) for argument in node.inputs}
            call = Call(operator, given, [self._laid(graph, name) for name in names])
            results = self.call(region + names[0], call, module=_module_of(node), writes=writes)
            for name, value in zip(names, results, strict=True):
                self.keep(region + name, value)

    def _inline(self, graph: _Graph, node: _Node, region: str, inner: str, depth: int) -> None:
        """Regions with another setting of autograd or autocast are part of the work around them."""
        what = node.target.rpartition(".")[2]
        bodies = [i for i, argument in enumerate(node.inputs) if "as_graph" in argument.arg]
        if not what.startswith("wrap") or len(bodies) != 1:
            raise Unsupported(f"{what:.60}: how often a branch or a loop runs is not known beforehand")
        body = validated(_Graph, node.inputs[bodies[0]].arg["as_graph"]["graph"])
        given = [name for argument in node.inputs[bodies[0] + 1 :] for name in _names(argument.arg)]
        for name, outer in zip([name for entry in body.inputs for name in _names(entry)], given, strict=True):
            self.keep(inner + name, self.values[region + outer])
        self._run(body, inner, depth + 1)
        made = [name for entry in body.outputs for name in _names(entry)]
        for name, inside in zip([name for out in node.outputs for name in _names(out)], made, strict=True):
            self.keep(region + name, self.values[inner + inside])

    def _resolved(self, graph: _Graph, argument: _Union, region: str) -> Any:
        ((kind, content),) = argument.items()
        match kind:
            case "as_tensor":
                return self.values[region + content["name"]]
            case "as_tensors":
                return [self.values[region + entry["name"]] for entry in content]
            case "as_optional_tensor":
                return self._resolved(graph, content, region) if "as_tensor" in content else None
            case "as_optional_tensors":
                return [self._resolved(graph, entry, region) if "as_tensor" in entry else None for entry in content]
            case "as_sym_int":
                return self._number(graph, content)
            case "as_sym_ints":
                return [self._number(graph, entry) for entry in content]
            case "as_int" | "as_ints" | "as_float" | "as_floats" | "as_bool" | "as_bools" | "as_string":
                return content
        return None

    def _number(self, graph: _Graph, argument: _Union) -> int | None:
        if "as_name" in argument:
            known = graph.sym_int_values.get(argument["as_name"])
            return None if known is None else _size(known)
        return int(argument["as_int"])

    def _laid(self, graph: _Graph, name: str) -> Laid:
        held = graph.tensor_values[name]
        if held.dtype not in _DTYPES:
            raise InvalidInput(f"tensor {name:.60}: there is no dtype {held.dtype}")
        shape = tuple(_size(size) for size in held.sizes)
        strides = tuple(_size(stride) for stride in held.strides)
        if len(strides) != len(shape):
            raise InvalidInput(f"tensor {name:.60}: has {len(shape)} sizes, but {len(strides)} strides")
        return Laid(TensorType(_DTYPES[held.dtype], shape), strides)


# ---- to run it -------------------------------------------------------------------------------------------------------


def as_module(path: str | Path) -> tuple[GraphModule, tuple[Tensor, ...]]:
    """The program as a module that torch can run, and arguments for it, all with content that nobody chose.

    Of what the file names, only operators of ATen that compute are called.
    """
    require("torch", "torch")
    with naming(path), _told():
        return _Rebuilder(_parsed(Path(path))[0]).rebuilt()


def own_values(path: str | Path, module: GraphModule, args: Sequence[Tensor]) -> list[str]:
    """Give a module of `as_module`, and its arguments, what the file has for them; the names of what it has none for.

    Weights are bytes in the archive, and read as such. Example inputs are a pickle, which torch's reader for weights
    alone takes apart, or else they are left as they are, and are called "inputs".
    """
    with naming(path), _told(), zipfile.ZipFile(path) as archive:
        without = [held for name, held in module.meta["paths"].items() if not _filled(archive, held, module, name)]
        return without if _given(archive, args) else [*without, "inputs"]


def _filled(archive: zipfile.ZipFile, path: str, module: GraphModule, name: str) -> bool:
    import torch

    held = module.get_buffer(name)
    for config in (
        entry for entry in archive.namelist() if entry.endswith(("_weights_config.json", "_constants_config.json"))
    ):
        entry = _json(archive, config)["config"].get(path)
        if entry is None or entry.get("use_pickle") or not entry.get("tensor_meta"):
            continue
        about = entry["tensor_meta"]
        sizes, strides = ([int(part["as_int"]) for part in about[key]] for key in ("sizes", "strides"))
        begin = int(about["storage_offset"]["as_int"]) * held.element_size()
        extent = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        if _DTYPES.get(about["dtype"]) != str(held.dtype).removeprefix("torch.") or sizes != [*held.shape]:
            raise InvalidInput(f"{path:.60}: the program has it with another type than the weights")
        if min((*strides, begin), default=0) < 0 or not 0 < extent <= 2 * held.numel():
            return not held.numel()
        with archive.open(f"{config.rpartition('/')[0]}/{entry['path_name']}") as file:
            file.seek(begin)
            raw = bytearray(file.read(extent * held.element_size()))
        if len(raw) < extent * held.element_size():
            raise InvalidInput(f"{path:.60}: its bytes are not all there")
        with torch.no_grad():
            held.copy_(torch.frombuffer(raw, dtype=held.dtype).as_strided(sizes, strides))
        return True
    return False


def _given(archive: zipfile.ZipFile, args: Sequence[Tensor]) -> bool:
    import io

    import torch
    from torch.utils import _pytree

    entry = next((entry for entry in archive.namelist() if "/sample_inputs/" in entry and entry.endswith(".pt")), None)
    if entry is None or archive.getinfo(entry).file_size > MAX_BYTES:
        return not args
    try:
        example = torch.load(io.BytesIO(archive.read(entry)), map_location="cpu", weights_only=True)
    except Exception:  # it says in many ways that there is more in it than tensors
        return not args
    found = [leaf for leaf in _pytree.tree_leaves(example) if isinstance(leaf, torch.Tensor)]
    if [(leaf.dtype, leaf.shape) for leaf in found] != [(arg.dtype, arg.shape) for arg in args]:
        return not args
    for arg, leaf in zip(args, found, strict=True):
        arg.copy_(leaf)
    return True


class _Rebuilder(_Reader):
    """Turns calls into nodes of torch's own graphs. Tensors are found under their names."""

    def __init__(self, module: _Module) -> None:
        import torch

        super().__init__(module, "", {})
        self.root, self.traced = torch.nn.Module(), torch.fx.Graph()
        self.arguments: list[Tensor] = []
        self.paths: dict[str, str] = {}  # what holds a weight to its name

    def rebuilt(self) -> tuple[GraphModule, tuple[Tensor, ...]]:
        import torch

        graph = self.module.graph
        self._inputs(graph)
        for node in graph.nodes:
            self._rebuild(graph, node)
        self.traced.output([self.values[name] for output in graph.outputs for name in _names(output)])
        made = torch.fx.GraphModule(self.root, self.traced)
        made.meta["paths"] = self.paths
        return made, tuple(self.arguments)

    def given(self, key: Hashable, name: str, kind: str, held: Laid, *, module: str = "", **columns: Any) -> Any:
        import torch

        dtype = getattr(torch, held.type.dtype)
        made = torch.empty_strided(held.type.shape, held.strides, dtype=dtype)  # takes no memory until it is written to
        if kind == "input":
            self.arguments.append(made)
            self.values[key] = self.traced.placeholder(f"input_{len(self.arguments)}")
        else:
            held_as = f"held_{len(self.values)}"
            self.paths[held_as] = name
            self.root.register_buffer(held_as, made)
            self.values[key] = self.traced.get_attr(held_as)
        return self.values[key]

    def keep(self, key: Hashable, value: Any) -> None:
        self.values[key] = value

    def empty(self, key: Hashable, held: Laid) -> None:
        self.given(key, str(key), "parameter", held)

    def _rebuild(self, graph: _Graph, node: _Node) -> None:
        import torch

        names = [entry for output in node.outputs for entry in _entries(output)]
        if not any(names):
            return
        space, _, rest = node.target.removeprefix("torch.ops.").partition(".")
        operator, _, overload = rest.partition(".")
        if space != "aten" or not known(operator_name(operator)[0]):
            raise Unsupported(f"{node.target:.60}: only operators of ATen that are known to compute are run")
        function = getattr(getattr(torch.ops.aten, operator), overload)
        if not isinstance(function, torch._ops.OpOverload):
            raise InvalidInput(f"{node.target:.60}: there is no such operator")
        given = {argument.name: self._resolved(graph, argument.arg, "") for argument in node.inputs}
        expected = {argument.name for argument in function._schema.arguments}
        for key, value in given.items():  # torch writes both into source text, which it executes
            if key not in expected or not _is_plain(value):
                raise InvalidInput(f"{node.target:.60}: takes no such argument as {key!r:.60}")
        for argument in node.inputs:
            if "as_scalar_type" in argument.arg:
                given[argument.name] = getattr(torch, _DTYPES[argument.arg["as_scalar_type"]])
        called = self.traced.call_function(function, kwargs={k: v for k, v in given.items() if v is not None})
        several = len(names) > 1 or "as_tensors" in node.outputs[0]
        for i, name in enumerate(names):
            if name is not None:
                self.values[name] = self.traced.call_function(getitem, (called, i)) if several else called


# ---- unions ----------------------------------------------------------------------------------------------------------

#: Under which name each role has its path.
_PATHS: Final = {
    "parameter": "parameter_name", "buffer": "buffer_name", "tensor_constant": "tensor_constant_name",
    "custom_obj": "custom_obj_name",
}  # fmt: skip


def _is_plain(value: Any) -> bool:
    """Whether an argument is what a program can have: a number, text, a tensor's node, or a list of these."""
    from torch.fx import Node

    return all(
        isinstance(part, bool | int | float | str | Node | None)
        for part in (value if isinstance(value, list) else [value])
    )


def _size(argument: _Union) -> int:
    """A symbolic size is what it was for the example inputs; its expression is left alone."""
    if "as_expr" in argument:
        hint = argument["as_expr"].get("hint")
        if hint is None:
            raise Unsupported("a shape depends on values that only a run can tell")
        argument = hint
    size = argument["as_int"]
    if not isinstance(size, int) or not 0 <= size < 2**63:
        raise InvalidInput(f"a size must be a whole number, 0 or more, found {size!r:.60}")
    return size


def _entries(argument: _Union) -> Iterator[str | None]:
    """The names of the tensors in an argument or a result, None where one is left out."""
    ((kind, content),) = argument.items()
    if kind == "as_tensor":
        yield str(content["name"])
    elif kind == "as_tensors":
        yield from (str(entry["name"]) for entry in content)
    elif kind == "as_optional_tensor":
        yield from _entries(content) if "as_tensor" in content else (None,)
    elif kind == "as_optional_tensors":
        for entry in content:
            yield from _entries(entry) if "as_tensor" in entry else (None,)


def _names(argument: _Union) -> Iterator[str]:
    return (name for name in _entries(argument) if name is not None)


def _qualified(target: str) -> str:
    """ "torch.ops.aten.add_.Tensor" as "aten::add_"."""
    parts = target.removeprefix("torch.ops.").split(".")
    return f"{parts[0]}::{parts[1]}" if len(parts) > 1 else target


def _module_of(node: _Node) -> str:
    """The path in the last entry of "key,path,class;key,path,class"; a second call of it is marked by "@1"."""
    *_, last = node.metadata.get("nn_module_stack", "").split(";")
    path = ",".join(last.split(",")[1:-1]).partition("@")[0]
    return "" if path.startswith("_empty_nn_module_stack") else path

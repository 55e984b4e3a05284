"""What files may hold, as pydantic models, and how a file that holds something else is told so in one line.

Imported only when a file is read, because pydantic takes a while to import.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from itertools import permutations
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    field_validator,
    model_validator,
)

from placewise.catalogue import device_like, link_like
from placewise.cluster import MAX_DEVICES
from placewise.errors import InvalidInput
from placewise.quantities import LARGEST, parse_quantity

# A file may hold millions of wrong entries, and pydantic collects them all before it tells of the first: therefore
# lists stop at the first, and objects are looked at before pydantic is let into them.
_T = TypeVar("_T")
D = TypeVar("D", bound=BaseModel)
List = Annotated[list[_T], Field(fail_fast=True)]


def _at_most(most: int) -> Callable[[Any], Any]:
    def check(data: Any) -> Any:
        if isinstance(data, dict) and len(data) > most:
            raise ValueError(f"must have at most {most} keys, found {len(data)}")
        return data

    return check


def _texts(data: Any) -> Any:
    for key, value in data.items() if isinstance(data, dict) else ():
        if not isinstance(value, str):
            raise ValueError(f"{_shown(key)} must be text in quotes, found {_shown(value)}")
    return data


class _Object(BaseModel):
    """Strict: text or true is not a number; a key that means nothing here is probably a typo of one that does."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    few_keys = model_validator(mode="before")(_at_most(100))


Count = Annotated[int, Field(ge=0, lt=2**31)]
Size = Annotated[float, Field(ge=0, le=LARGEST)]
Total = Annotated[float, Field(ge=0)]  # of sizes, so it may be larger than any of them
Phase = Literal["forward", "backward", "update"]
Label = Literal["given", "modelled", "measured"]


def _quantity(dimension: str, *, null: float | None = None) -> PlainValidator:
    """A number or a text with a unit; `null` is what null stands for, where it may stand."""

    def read(value: Any) -> float:
        if value is None and null is not None:
            return null
        try:
            return parse_quantity(value, dimension)
        except InvalidInput as error:
            raise ValueError(str(error)) from None

    return PlainValidator(read)


Memory = Annotated[float, _quantity("bytes", null=math.inf)]
Bandwidth = Annotated[float, _quantity("bytes per second", null=math.inf)]
Rate = Annotated[float, _quantity("FLOP per second", null=math.inf)]
Seconds = Annotated[float, _quantity("seconds")]


# ---- graphs ----------------------------------------------------------------------------------------------------------


class Ops(_Object):
    """One list per property, with one entry per op; a property that is missing has its default everywhere."""

    name: List[str]
    kind: List[str] | None = None
    dtype: List[str] | None = None
    module: List[str] | None = None
    signature: List[str] | None = None
    flops: List[Size] | None = None
    bytes_accessed: List[Size] | None = None
    scratch: List[Size] | None = None
    resident: List[Size] | None = None
    phase: List[Phase] | None = None
    model: List[Count] | None = None
    group: List[Annotated[int, Field(ge=-1, lt=2**31 - 1)]] | None = None


class Tensors(_Object):
    """Who makes each tensor, how large it is, and who reads it: ops by their position."""

    producer: List[Count] = []
    bytes: List[Size] = []
    consumers: List[List[Count]] = []


class GraphData(_Object):
    """A `Graph`."""

    name: str = "graph"
    models: List[str] | None = None
    ops: Ops
    tensors: Tensors = Tensors()


# ---- clusters --------------------------------------------------------------------------------------------------------


class DeviceData(_Object):
    """A `Device`; with `like`, what is not given is as the catalogue has it."""

    name: str
    like: str | None = Field(None, exclude=True)
    kind: str = "gpu"
    memory: Memory = math.inf
    flops: Annotated[dict[str, Rate], BeforeValidator(_at_most(100))] = {}
    bandwidth: Bandwidth = math.inf
    launch: Seconds = 0.0
    copies: bool = True
    shards: int = 1
    profile: str | None = None  # the name of a profile, or its file

    @model_validator(mode="after")
    def _resolve(self) -> DeviceData:
        return self if self.like is None else _filled(self, device_like, self.like)


class LinkData(_Object):
    """One direction (`from`, `to`), both directions of each pair of some devices, or every pair not given elsewhere."""

    source: str | None = Field(None, alias="from")
    target: str | None = Field(None, alias="to")
    between: Any = None
    like: str | None = None
    bandwidth: Bandwidth = math.inf
    latency: Seconds = 0.0
    via: List[str] = []

    @field_validator("between")
    @classmethod
    def _known_form(cls, value: Any) -> Any:
        some = isinstance(value, list) and 2 <= len(value) <= MAX_DEVICES and all(isinstance(x, str) for x in value)
        if value != "all" and not some:
            raise ValueError(f"must be 'all' or a list of two or more device names, found {_shown(value)}")
        return value

    @model_validator(mode="after")
    def _has_ends(self) -> LinkData:
        one_way = (self.source is not None, self.target is not None)
        if one_way != ((True, True) if self.between is None else (False, False)):
            raise ValueError("give either 'between', or 'from' and 'to'")
        return self if self.like is None else _filled(self, link_like, self.like)

    @property
    def pairs(self) -> Iterable[tuple[str, str]]:
        """Source and target of each direction."""
        if self.source is not None and self.target is not None:
            return [(self.source, self.target)]
        return permutations(self.between, 2)

    def channels(self, source: str, target: str) -> tuple[str, ...]:
        """`via` for one direction: within `between`, {from} and {to} stand for the names of its ends."""
        if self.between is None:
            return tuple(self.via)
        return tuple(name.replace("{from}", source).replace("{to}", target) for name in self.via)


def _filled(data: D, known: Callable[[str, Mapping[str, Any]], dict[str, Any]], name: str) -> D:
    """With the figures of the catalogue where the file gives none."""
    given = {field: getattr(data, field) for field in data.model_fields_set}
    try:
        for field, value in known(name, given).items():
            setattr(data, field, value)
    except InvalidInput as error:
        raise ValueError(str(error)) from None
    return data


class ClusterData(_Object):
    """A `Cluster`."""

    name: str = "cluster"
    devices: Annotated[List[DeviceData], Field(max_length=MAX_DEVICES)]
    links: List[LinkData] = []


# ---- profiles --------------------------------------------------------------------------------------------------------


class OpTimes(_Object):
    """`OpTime`s, one list per property."""

    signature: List[str] = []
    kind: List[str] = []
    dtype: List[str] = []
    flops: List[Size] = []
    bytes_accessed: List[Size] = []
    seconds: List[Size] = []
    spread: List[Size] = []
    scratch: List[Size] = []


class ModelTimes(_Object):
    """`ModelTime`s, one list per property."""

    name: List[str] = []
    seconds: List[Size] = []
    spread: List[Size] = []
    sum_of_ops: List[Size] = []


class ProfileData(_Object):
    """A `Profile`."""

    name: str
    device: str
    hardware: str
    library: str
    date: str
    ops: OpTimes
    models: ModelTimes = ModelTimes()


# ---- problems and plans ----------------------------------------------------------------------------------------------


class CostsData(_Object):
    """`Costs`, one column per device; null where the device cannot run the op. One label, or columns of `labels`."""

    seconds: Annotated[dict[str, List[Size | None]], BeforeValidator(_at_most(MAX_DEVICES))]
    label: Label = "given"
    labels: Annotated[dict[str, List[Label]] | None, BeforeValidator(_at_most(MAX_DEVICES))] = None


class ConstraintsData(_Object):
    """The constraints of a `Problem`."""

    pins: Annotated[dict[str, str], BeforeValidator(_texts)] = {}
    forbidden: List[str] = []
    contiguous: bool = False
    max_devices: Count | None = None


class ExecutionData(_Object):
    """An `Execution`, which itself says what each text may be."""

    concurrency: str = "parallel"
    slots: Count = 1
    contention: str = "channel"
    sends: str = "tensor"
    memory: str = "live"
    prefetch: Count = 2
    overlap: bool = True
    staged: bool = False
    pipeline: str = "1f1b"
    replicate: bool = False
    microbatches: Count = 1
    in_flight: str = "one"
    recompute: bool = False


class ProblemData(_Object):
    """A `Problem`; without costs it has those of the roofline model."""

    graph: GraphData
    cluster: ClusterData
    costs: CostsData | None = None
    objective: str = "latency"
    execution: ExecutionData = ExecutionData()
    constraints: ConstraintsData = ConstraintsData()


class Digests(_Object):
    """Of the parts of the problem and of the answer, so that an edited file is noticed."""

    graph: str
    cluster: str
    costs: str
    problem: str  # all of the above, objective, execution and constraints
    answer: str  # devices, order, value and lower bound


class PlanData(_Object):
    """A `Plan`: devices by name in the order of the ops, `order` by the positions of ops."""

    problem: ProblemData
    digests: Digests
    devices: List[str]
    order: List[Count] | None
    value: Total
    lower_bound: Total
    planner: str
    found_by: str = ""
    proved_by: str = ""
    version: str
    seed: int
    options: dict[str, Any]
    seconds: Total
    evaluations: Annotated[int, Field(ge=0)]
    stopped: str
    history: List[Annotated[tuple[Total, int, Total], Field(strict=False)]]  # JSON has lists, not tuples
    bounds: List[Annotated[tuple[Total, Total], Field(strict=False)]] = []


# ---- what was run, and what was cut up -------------------------------------------------------------------------------


class FindingData(_Object):
    """One claim that was tried."""

    claim: str
    claimed: float | None
    found: float | None
    verdict: str


class VerificationData(_Object):
    """What `placewise verify --json` prints; more than is read here may be in it."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    plan: str  # its digest
    engine: str
    library: str
    holds: bool
    within: float | None = None  # older files do not say
    predicted: float
    placed: float
    plain: float
    placed_spread: float
    plain_spread: float
    findings: List[FindingData]


class SegmentData(_Object):
    """One model of a model that was cut up, and what runs it."""

    file: str
    device: str
    inputs: List[str]
    outputs: List[str]
    nodes: List[str]


class SplitData(_Object):
    """What `placewise export --to onnxruntime-split` writes beside the models."""

    format: Literal["placewise-onnxruntime-split/1"]
    model: str
    inputs: List[str]
    outputs: List[str]
    segments: List[SegmentData]


# ---- one clear line --------------------------------------------------------------------------------------------------


def validated(schema: type[D], data: Any) -> D:
    """The data as the schema has it, or an error like `problem.graph.ops.flops[12]: must be 0 or more, found -3`."""
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = "".join(f"[{step}]" if isinstance(step, int) else f".{_plain(step)}" for step in first["loc"])
        raise InvalidInput(f"{place.removeprefix('.') or 'the content'}: {_complaint(first)}") from None


_COMPLAINTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "greater_than_equal": lambda limit: f"must be {limit['ge']:g} or more",
    "greater_than": lambda limit: f"must be above {limit['gt']:g}",
    "less_than": lambda limit: f"must be below {limit['lt']}",
    "less_than_equal": lambda limit: f"must be at most {limit['le']:g}",
    "too_long": lambda limit: f"must have at most {limit['max_length']} entries",
    "finite_number": lambda _: "must be finite",
    "float_type": lambda _: "must be a number",
    "int_type": lambda _: "must be a whole number",
    "bool_type": lambda _: "must be true or false",
    "string_type": lambda _: "must be text in quotes",
    "string_unicode": lambda _: "must be text without half characters",
    "list_type": lambda _: "must be a list",
    "dict_type": lambda _: "must be an object with keys",
    "model_type": lambda _: "must be an object with keys",
    "literal_error": lambda limit: f"must be {limit['expected']}",
}


def _complaint(error: Any) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "missing":
        return "is missing"
    if kind == "extra_forbidden":
        return "is not a known key"
    if kind == "value_error":  # ours, and it quotes what it found
        return str(context["error"])
    if kind in _COMPLAINTS:
        return f"{_COMPLAINTS[kind](context)}, found {_shown(error['input'])}"
    return f"{error['msg']:.200}"


def _shown(value: Any) -> str:
    """A short text for a value of any size."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    value = value[:60] if isinstance(value, str) else value
    text = _plain(json.dumps(value, ensure_ascii=False, default=str))
    return text if len(text) <= 60 else f"{text[:57]}..."


def _plain(text: str) -> str:
    """Short, on one line, and without half characters, which no terminal shows."""
    short = text[:60]
    return short if short.isprintable() else short.encode("unicode_escape").decode()

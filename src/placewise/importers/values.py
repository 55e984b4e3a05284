"""What the named values of a model file are while its ops are read in order: known, stored, or made by an op."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from placewise.errors import InvalidInput, Unsupported, listed
from placewise.graph import Tensor
from placewise.importers.assembly import Assembly
from placewise.kinds import TensorType, family
from placewise.quantities import LARGEST

#: Up to this many bytes, constants that are shapes, axes or indices, and what follows from them and from shapes alone,
#: are settings of the ops that read them. Of other dtypes only a single number is; all else is a weight.
SMALL: Final = 64 * 1024
_SETTINGS: Final = frozenset({"int64", "int32", "bool", "string"})
#: The kind of ops that hand on every element that they get, in another shape or not: consumers read the source.
SAME: Final = "same"
#: Kinds of ops that do nothing where they make what they read.
_IDLE: Final = frozenset({"view", "copy", "cast", "pad"})
#: Families whose work follows from their first inputs: one that is known is there as well.
_OPERANDS: Final = {"matmul": 2, "conv": 2, "attention": 3, "recurrent": 1, "reduce": 1}


@dataclass
class Work:
    """What a node of a model file is, in Placewise's terms."""

    kind: str
    attributes: dict[str, Any] = field(default_factory=dict)
    inputs: list[Any] | None = None  # the keys of all that it reads, if not of all that it is given
    seen_as: dict[int, TensorType] = field(default_factory=dict)  # see `Values.op`


class Values:
    """Maps each value to the tensors that who reads it reads.

    None for what is known before anything runs; several for a weight that is computed from stored tensors alone (it is
    compressed, say): runtimes do that once, ahead of time.
    """

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly
        self._tensors: dict[Hashable, tuple[Tensor, ...]] = {}
        self._types: dict[Hashable, TensorType | None] = {}
        self._weights: dict[Hashable, Callable[[], Tensor] | None] = {}  # what makes one that nobody has read yet

    def __contains__(self, key: Hashable) -> bool:
        return key in self._types

    def type_of(self, key: Hashable) -> TensorType:
        """Dtype and shape of a value that an op reads."""
        found = self._types.get(key)
        if found is None:
            raise InvalidInput(f"the shape of {key!r:.60} is not known")
        return found

    def is_weight(self, key: Hashable) -> bool:
        """Whether a value is stored, or follows from stored ones alone."""
        return key in self._weights

    def is_known(self, key: Hashable) -> bool:
        """Whether a value is known before anything runs."""
        return self._tensors.get(key) == ()

    def set_known(self, key: Hashable, type: TensorType | None) -> None:
        """A setting of the ops that read it."""
        self._types[key], self._tensors[key] = type, ()

    def set_same(self, key: Hashable, other: Hashable) -> None:
        """Another key for a value."""
        self._types[key], self._tensors[key] = self._types[other], self.read([other])
        if other in self._weights:
            self._weights[key] = None

    def constant(self, key: Hashable, type: TensorType, name: str, module: str) -> None:
        """A constant: a setting, or a parameter that becomes an op when somebody reads it."""
        _checked(type, name)
        if not type.shape or (type.dtype in _SETTINGS and type.bytes <= SMALL):
            self.set_known(key, type)
        else:
            self._types[key] = type
            self._weights[key] = partial(self._assembly.stored, name, type, module=module)

    def read(self, keys: Iterable[Hashable]) -> tuple[Tensor, ...]:
        """The tensors of values, in order."""
        found: list[Tensor] = []
        for key in keys:
            make = self._weights.get(key)
            if make is not None:
                self._tensors[key] = (make(),)
                self._weights[key] = None
            found += self._tensors[key]
        return tuple(found)

    def op(
        self,
        name: str,
        kind: str,
        inputs: Sequence[Hashable],
        outputs: Mapping[Any, TensorType],
        attributes: Mapping[str, Any] | None = None,
        *,
        seen_as: Mapping[int, TensorType] | None = None,
        **columns: Any,
    ) -> None:
        """Add an op, unless it does nothing at run time. `seen_as` are inputs, by position, that it sees otherwise."""
        for key, type in outputs.items():
            _checked(type, f"{name:.60}: {key!r:.60}")
        self._types.update(outputs)
        if all(self.is_known(key) for key in inputs) and kind not in ("input", "state"):
            if sum(type.bytes for type in outputs.values()) <= SMALL:
                self._tensors.update(dict.fromkeys(outputs, ()))
                return
        elif len(outputs) == 1 and inputs and self._hands_on(kind, inputs, *outputs):
            return
        for key in inputs[: _OPERANDS.get(family(kind), 0)]:
            if self.is_known(key):
                self._tensors[key] = tuple(self._assembly.op(f"{name}:constant", "constant", [], [self.type_of(key)]))
        given: list[Tensor] = []
        for position, key in enumerate(inputs):
            tensors = list(self.read([key]))
            if seen_as and position in seen_as and tensors:  # in the dtype that is stored
                held = self._assembly.type_of(tensors[0]).dtype
                tensors[0] = self._assembly.view(tensors[0], TensorType(held, seen_as[position].shape))
            given += tensors
        kind = "copy" if kind == SAME else kind
        made = self._assembly.op(name, kind, given, [*outputs.values()], attributes, **columns)
        self._tensors.update((key, (tensor,)) for key, tensor in zip(outputs, made, strict=True))

    def _hands_on(self, kind: str, inputs: Sequence[Hashable], key: Hashable) -> bool:
        """Whether the op does nothing at run time but hand on a source, which its value then is: in the shape that it
        gets, but in the dtype that is stored.
        """
        stored = all(self.is_known(given) or self.is_weight(given) for given in inputs)
        source = max(inputs, key=lambda given: self.type_of(given).elements) if stored else inputs[0]
        if self.is_known(source) or self.type_of(source).elements != self.type_of(key).elements:
            return False
        if not (stored or kind == SAME or (kind in _IDLE and self.type_of(source) == self.type_of(key))):
            return False
        main, *others = self.read([source])
        held = TensorType(self._assembly.type_of(main).dtype, self.type_of(key).shape)
        rest = self.read(given for given in inputs if given != source) if stored else ()
        self._tensors[key] = (self._assembly.view(main, held), *others, *rest)
        if stored:
            self._weights[key] = None
        return True


def _checked(type: TensorType, where: str) -> None:
    """Sizes that a file claims are not yet sizes."""
    if any(size < 0 for size in type.shape):
        raise InvalidInput(f"{where}: a size is negative: {type!s:.100}")
    if type.elements > LARGEST / 16:
        raise InvalidInput(f"{where}: too large: {type!s:.100}")


def own_kind(framework: str, op: str) -> str:
    """The kind of an op that has no formula here: it is costed by its bytes, which is a grave mistake for some."""
    if _COMPUTES_MUCH.search(op):
        raise Unsupported(f"how much a {op:.60} of this form computes is not known; please report it")
    return f"{framework}.{op}"


def check_body(inside: Iterable[tuple[str, str]]) -> None:
    """Branches and loops are costed by their bytes too, unless there is an op (type, name) in them that computes much:
    how often it runs is not known.
    """
    for op, name in inside:
        if _COMPUTES_MUCH.search(op):
            what = f"how often the {op:.60} {name!r:.60} in its body runs is not known"
            raise Unsupported(f"{what}: unroll the loop, or keep one branch, before the model is saved")


_COMPUTES_MUCH: Final = re.compile(r"MatMul|Gemm|Conv(?!ert)|Attention|LSTM|GRU|RNN|Einsum|MoE")


def check_dims(dims: Mapping[str, int]) -> None:
    """Sizes that the user gives for dimensions that the model leaves open."""
    for name, size in dims.items():
        if isinstance(size, bool) or not isinstance(size, int) or not 0 < size < 2**31:
            raise InvalidInput(
                f"dims: {name!r:.60} must be a whole number above zero, and below 2^31, found {size!r:.60}"
            )


def need_dims(missing: Iterable[str]) -> InvalidInput:
    """What to say about dimensions whose sizes are not given."""
    names = list(dict.fromkeys(missing))
    example = ", ".join(f"{name!r:.60}: 1" for name in names[:3])
    option = shlex.quote(f"{names[0]:.60}=1")
    return InvalidInput(
        f"the size of {listed(names)} is not fixed: give it, such as dims={{{example}}}, "
        f"or `--dim {option}` of the commands import and profile"
    )

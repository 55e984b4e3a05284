"""What the readers of published files share: field types, and one way to say which field is wrong."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from placewise.errors import InvalidInput

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Identifier = Annotated[int, Field(gt=-(2**63), lt=2**63)]
Index = Annotated[int, Field(ge=0, lt=2**31)]
#: Each device gets a link to every other, so an absurd number of them would fill memory before any check could fail.
DeviceCount = Annotated[int, Field(ge=0, le=1024)]
Flag = bool | Literal[0, 1]


class Record(BaseModel):
    """A JSON object. Strict: "3" is not a number and true is not a time; fields that nobody reads are let be."""

    model_config = ConfigDict(strict=True, frozen=True)


R = TypeVar("R", bound=Record)


def read(schema: type[R], data: Any, name: str) -> R:
    """`data` as a record, or an error that names the first wrong field, such as nodes[3].fpgaLatency."""
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        given = "" if first["type"] == "missing" else f" = {_short(first['input'])}"
        raise InvalidInput(f"{name}: {_place(first['loc'])}{given}: {first['msg'].lower()}") from None


def _place(steps: tuple[int | str, ...]) -> str:
    """Pydantic's location as people write it, less the names of union members, which are no place in the file."""
    place = ""
    for step in steps:
        if isinstance(step, int):
            place += f"[{step}]"
        elif step not in ("bool", "literal[0,1]"):
            place += f".{step}" if place else step
    return place or "the file"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."

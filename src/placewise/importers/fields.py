"""What the readers of published files share: field types, and errors that begin with the file's name."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from placewise._schemas import validated
from placewise.errors import InvalidInput


def _zero_or_one(value: Any) -> Any:
    return bool(value) if isinstance(value, int) and value in (0, 1) else value


Amount = Annotated[float, Field(ge=0)]
Rate = Annotated[float, Field(gt=0)]
Identifier = Annotated[int, Field(gt=-(2**63), lt=2**63)]
Index = Annotated[int, Field(ge=0, lt=2**31)]
#: Each device gets a link to every other, so an absurd number of them would fill memory before any check could fail.
DeviceCount = Annotated[int, Field(ge=0, lt=1000)]
Flag = Annotated[bool, BeforeValidator(_zero_or_one)]


class Record(BaseModel):
    """A JSON object. Strict: "3" is not a number and true is not a time; fields that nobody reads are let be."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)


R = TypeVar("R", bound=Record)


def read(schema: type[R], data: Any, name: str) -> R:
    """`data` as a record, or an error that names the file and the first wrong field, such as nodes[3].fpgaLatency."""
    try:
        return validated(schema, data)
    except InvalidInput as error:
        raise InvalidInput(f"{name}: {error}") from None

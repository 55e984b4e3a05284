"""The field types that the readers of published files share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from placewise.cluster import MAX_DEVICES
from placewise.quantities import LARGEST


def _zero_or_one(value: Any) -> Any:
    return bool(value) if isinstance(value, int) and value in (0, 1) else value


Amount = Annotated[float, Field(ge=0, le=LARGEST)]
Rate = Annotated[float, Field(gt=0)]
Identifier = Annotated[int, Field(gt=-(2**63), lt=2**63)]
Index = Annotated[int, Field(ge=0, lt=2**31)]
DeviceCount = Annotated[int, Field(ge=0, le=MAX_DEVICES)]
Flag = Annotated[bool, BeforeValidator(_zero_or_one)]


class Record(BaseModel):
    """A JSON object. Strict: "3" is not a number and true is not a time; fields that nobody reads are let be."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)

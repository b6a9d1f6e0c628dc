"""The base of every document node."""

from pydantic import BaseModel, ConfigDict


class Node(BaseModel):
    """Immutable, no unknown fields, no silent coercion, no numbers that are none."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

"""The base of every document node."""

from pydantic import BaseModel, ConfigDict


class Node(BaseModel):
    """Immutable, no unknown fields, no silent coercion."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

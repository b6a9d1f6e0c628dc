"""Tensors, the memory tiers they live in, and the static slots they occupy."""

from typing import Literal

from twinstream.schedule.node import Node
from twinstream.schedule.numbers import Index, PositiveSize, Size

Role = Literal[
    "parameter",
    "gradient",
    "optimizer_state",
    "activation",
    "context",
    "input",
    "loss",
    "scratch",
]


class Tier(Node):
    """One memory: HBM of a device, host RAM, a disk. Each tier has one arena."""

    kind: Literal["device", "host", "disk"]
    index: Index = 0

    @property
    def alignment_bytes(self) -> int:
        return 4096 if self.kind == "disk" else 256

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}"


DEVICE = Tier(kind="device")
HOST = Tier(kind="host")


class Tensor(Node):
    """Named bytes with versions.

    A tensor with a `parent` is a part of it, `offset_bytes` into it; a parent has no parent of
    its own. Versions live on parts: a parent is at version v when each of its parts is. Parts of
    one parent do not overlap; bytes that no part covers are padding.
    """

    tensor_id: str
    size_bytes: PositiveSize
    role: Role
    dtype: str
    shape: tuple[PositiveSize, ...]
    parent: str | None = None
    offset_bytes: Size = 0


class Slot(Node):
    """A static byte range of a tier's arena.

    Slots may overlap; only live contents may not. The slot's first byte stands for byte
    `origin_bytes` of the root tensor held, so that a slot can hold a parent, one of its parts
    alone, or a stretch of its parts: tensor t lies at
    `offset_bytes + t.offset_bytes - origin_bytes`.
    """

    slot_id: str
    tier: Tier
    offset_bytes: Size
    size_bytes: PositiveSize
    origin_bytes: Size = 0


class Carried(Node):
    """A tensor whose final version is valid in a slot at the boundary between two passes."""

    tensor: str
    slot: str

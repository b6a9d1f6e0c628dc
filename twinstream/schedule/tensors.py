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


TierKind = Literal["device", "host", "disk"]


class Tier(Node):
    """One memory: HBM of a device, host RAM, a disk. Each tier has one arena.

    A disk's is files: those that a run names of what is only read, and one of its own of the rest.
    """

    kind: TierKind
    index: Index = 0

    @property
    def alignment_bytes(self) -> int:
        return 4096 if self.kind == "disk" else 256

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}"


DEVICE = Tier(kind="device")
HOST = Tier(kind="host")
DISK = Tier(kind="disk")
TIERS = (DEVICE, HOST, DISK)


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


_ITEM_BYTES = {"float32": 4, "int32": 4, "bfloat16": 2, "float16": 2}


def flat_shape(size_bytes: int, dtype: str) -> tuple[str, tuple[int, ...]]:
    """Dtype and shape of a flat tensor: its elements, or bytes where it is no whole number of them.

    >>> flat_shape(12, "bfloat16"), flat_shape(13, "bfloat16")
    (('bfloat16', (6,)), ('uint8', (13,)))
    """
    count, left = divmod(size_bytes, _ITEM_BYTES.get(dtype, 1))
    return ("uint8", (size_bytes,)) if left else (dtype, (count,))


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

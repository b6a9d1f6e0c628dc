"""Arenas, one per tier, and views of tensors in their slots."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from twinstream.executor.backends.gpu import TorchGpu
from twinstream.executor.kernels.operand import KernelOperand, Pack
from twinstream.executor.memory.disk_arena import DiskArena
from twinstream.executor.memory.staging import Staging
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.ops import Communicate, Compute, Copy
from twinstream.schedule.proof.accesses import AccessMap
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.tensors import DISK, Tier

POISON_BYTE = 0xFF  # as bf16 and float32 a NaN


class ArenaMemory(Protocol):
    """The bytes of one tier: a 1-D uint8 tensor, or several that stand for one."""

    def __getitem__(self, wanted: slice) -> torch.Tensor:
        """A view of bytes `wanted.start` to `wanted.stop`."""

    def fill_(self, value: int) -> object:
        """Set every byte."""

    def numel(self) -> int:
        """How many there are."""


@dataclass(frozen=True)
class Piece:
    """Bytes of an arena from `start` on."""

    start: int
    bytes: torch.Tensor


class PieceMemory:
    """An arena in consecutive pieces. A view never reaches over the end of one."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = tuple(pieces)

    def __getitem__(self, wanted: slice) -> torch.Tensor:
        for piece in self.pieces:
            low, high = wanted.start - piece.start, wanted.stop - piece.start
            if low >= 0 and high <= piece.bytes.numel():
                return piece.bytes[low:high]
        raise AssertionError(f"bytes {wanted.start} to {wanted.stop} lie in no single piece")

    def fill_(self, value: int) -> None:
        for piece in self.pieces:
            piece.bytes.fill_(value)

    def numel(self) -> int:
        return sum(piece.bytes.numel() for piece in self.pieces)


class DeviceArena:
    """The slab of a device, and the GPU that runs what lies in it, once something has run.

    A training, its evaluations and its flushes lie in one, and share streams and a pool.
    """

    def __init__(self, slab: torch.Tensor) -> None:
        self._slab = slab
        self.gpu: TorchGpu | None = None

    def __getitem__(self, wanted: slice) -> torch.Tensor:
        return self._slab[wanted]

    def fill_(self, value: int) -> None:
        self._slab.fill_(value)

    def numel(self) -> int:
        return self._slab.numel()


class Arenas:
    """The bytes of every tier that a schedule uses; slots are views into them.

    Attributes:
        packs: what the host knows of packed sequences by the address of their starts: noted where
            they are fed and copied, in the order of the ops, while `follows_packs`.
    """

    def __init__(self, schedule: RankSchedule, memory: Mapping[Tier, ArenaMemory]) -> None:
        self._map = AccessMap(schedule.tensors, schedule.slots)
        self.memory = dict(memory)
        self._views: dict[tuple[str, str, int | None], torch.Tensor] = {}
        self._operands: dict[str, dict[str, KernelOperand]] = {}
        self.packs: dict[int, Pack] = {}
        self.follows_packs = True

    @staticmethod
    def sizes(schedule: RankSchedule) -> dict[Tier, int]:
        """Bytes of each tier's arena; a disk's are there already."""
        tiers = sorted({slot.tier for slot in schedule.slots} - {DISK}, key=str)
        return {tier: arena_bytes(schedule, tier) for tier in tiers}

    def view(self, tensor: str, slot: str, num_parts: int | None = None) -> torch.Tensor:
        """The tensor's bytes in the slot, 1-D uint8; of a disk a copy that is read anew."""
        if self.tier(slot) == DISK:
            start, end = self._map.address(tensor, slot, num_parts)
            return self.memory[DISK][start:end]
        key = (tensor, slot, num_parts)
        if key not in self._views:
            start, end = self._map.address(tensor, slot, num_parts)
            self._views[key] = self.memory[self._map.slots[slot].tier][start:end]
        return self._views[key]

    def part(self, tensor: str, slot: str, low: int, high: int) -> torch.Tensor:
        """Some of the tensor's bytes in the slot; of a disk a copy of these alone."""
        start, _ = self._map.address(tensor, slot, None)
        return self.memory[self.tier(slot)][start + low : start + high]

    def put(self, tensor: str, slot: str, source: torch.Tensor, staging: Staging) -> None:
        """Fill the slot with the tensor, 1-D uint8; a file that is only read has it already."""
        if self.tier(slot) != DISK:
            staging.copy(self.view(tensor, slot), source)
            return
        start, _ = self._map.address(tensor, slot, None)
        if not self._disk.is_file(start):
            self._disk.write(start, source.cpu())

    def tier(self, slot: str) -> Tier:
        """Where a slot lies."""
        return self._map.slots[slot].tier

    def operands(self, op: Compute) -> dict[str, KernelOperand]:
        """What the op's kernel is called with, by operand name."""
        if op.op_id not in self._operands:
            self._operands[op.op_id] = {
                o.name: found for o, found in zip(op.operands, self.in_order(op), strict=True)
            }
        return self._operands[op.op_id]

    def in_order(self, op: Compute | Communicate) -> list[KernelOperand]:
        """The op's operands, in its order."""
        return [
            KernelOperand(self.view(o.tensor, o.slot, o.num_parts), o.mode, self.packs, o.version)
            for o in op.operands
        ]

    def copy_views(self, op: Copy) -> tuple[torch.Tensor, torch.Tensor]:
        """(source, destination) bytes."""
        source = self.view(op.tensor, op.source, op.num_parts)
        return source, self.view(op.tensor, op.destination, op.num_parts)

    def disk_copy(self, op: Copy) -> Callable[[], None]:
        """What carries out a copy between a disk and host memory."""
        if self.tier(op.source) == DISK:
            start, end = self._map.address(op.tensor, op.source, op.num_parts)
            into = self.view(op.tensor, op.destination, op.num_parts)
            return partial(self._disk.read, start, end, into)
        start, _ = self._map.address(op.tensor, op.destination, op.num_parts)
        source = self.view(op.tensor, op.source, op.num_parts)
        return partial(self._disk.write, start, source)

    @property
    def _disk(self) -> DiskArena:
        disk = self.memory[DISK]
        assert isinstance(disk, DiskArena), "a disk's tier has its arena"
        return disk

    def poison(self) -> None:
        """Fill everything with NaN."""
        for memory in self.memory.values():
            memory.fill_(POISON_BYTE)

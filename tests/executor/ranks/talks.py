"""Schedules by hand: the host feeds, ranks communicate, the host fetches."""

from collections.abc import Iterable
from typing import Any

import torch

from tests.helpers.sketches import sketch
from tests.schedule.cluster.small_clusters import cluster_of
from twinstream.executor.ranks.rank_run import RankInputs, RankOutcome
from twinstream.schedule.cluster.projecting import RankPart
from twinstream.schedule.derived.waits import derive_waits
from twinstream.schedule.document import Mesh, RankClass, RankSchedule, Schedule
from twinstream.schedule.ops import Communicate, Copy, Feed, Fetch, Label, Op, Operand, Stream
from twinstream.schedule.tensors import DEVICE, HOST, Slot, Tensor, Tier

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Talk:
    """Ops of one class, in issue order; every tensor has a slot in each memory.

    Where a message comes from a rank of the same class, the tensor has a second place.
    """

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.order: list[str] = []
        self._tensors: dict[str, Tensor] = {}
        self._slots: list[Slot] = []
        self._ends: dict[Tier, int] = {HOST: 0, DEVICE: 0}
        self._versions: dict[str, int] = {}
        self._tensor_of: dict[str, str] = {}
        self._counts: dict[tuple[Any, ...], int] = {}

    def tensor(self, name: str, count: int, dtype: str = "float32") -> str:
        size = count * DTYPES[dtype].itemsize
        self._tensors[name] = Tensor(
            tensor_id=name, size_bytes=size, role="activation", dtype=dtype, shape=(count,)
        )
        self._versions[name] = 0
        return self.place(name, name)

    def place(self, name: str, tensor: str) -> str:
        """Another place for a tensor."""
        self._tensor_of[name] = tensor
        size = self._tensors[tensor].size_bytes
        for tier in (HOST, DEVICE):
            slot = f"{tier.kind}.{name}"
            offset = self._ends[tier]
            self._slots.append(Slot(slot_id=slot, tier=tier, offset_bytes=offset, size_bytes=size))
            self._ends[tier] += -(-size // 256) * 256
        return name

    def feed(self, name: str, count: int, dtype: str = "float32") -> str:
        """The values that `value` says, on the device."""
        self.tensor(name, count, dtype)
        self._versions[name] = 1
        host = Stream(queue="host")
        self.ops.append(
            Feed(op_id=f"feed.{name}", stream=host, tensor=name, version=1, slot=f"host.{name}",
                 source=name, index=0)
        )  # fmt: skip
        self.ops.append(self._copy(name, "host", "device"))
        return name

    def fetch(self, *names: str) -> None:
        for name in names:
            self.ops.append(self._copy(name, "device", "host"))
            self.ops.append(
                Fetch(op_id=f"fetch.{name}", stream=Stream(queue="host"), sink=name,
                      tensor=self._tensor_of[name], version=self._version(name),
                      slot=f"host.{name}")
            )  # fmt: skip

    def _copy(self, name: str, source: str, destination: str) -> Copy:
        queue = "h2d" if destination == "device" else "d2h"
        return Copy(
            op_id=f"{queue}.{name}", stream=Stream(queue=queue), tensor=self._tensor_of[name],
            version=self._version(name), source=f"{source}.{name}",
            destination=f"{destination}.{name}",
        )  # fmt: skip

    def say(
        self, collective: str, axes: Iterable[str], given: str = "", taken: str = "", **how: Any
    ) -> str:
        """From one tensor to another, or in place where only `given` is named. Its id.

        Sums are in rank order unless `reduction` says otherwise; `queue` and `shift` are as in ops.
        """
        axes, shift, queue = tuple(axes), how.get("shift", 0), how.get("queue")
        queue = queue or (collective if shift else ".".join(axes))
        key = (axes, shift, collective if shift else queue)
        self._counts[key] = self._counts.get(key, -1) + 1
        op_id = f"{collective}.{given}.{taken}"
        operands = []
        if given and not taken and not shift:
            operands.append(self._operand(given, "update"))
            self._versions[given] += 1
        else:
            operands += [self._operand(given, "read")] if given else []
            if taken:
                if taken in self._versions:  # else the same version, from elsewhere
                    self._versions[taken] += 1
                operands.append(self._operand(taken, "write"))
        self.ops.append(
            Communicate.model_validate({
                "op_id": op_id, "stream": Stream(queue=queue), "collective": collective,
                "axes": axes, "shift": shift, "sequence": self._counts[key],
                "operands": tuple(operands), "label": Label(kind="talk"),
                "reduction": how.get("reduction", "rank_order"),
                "last_first": how.get("last_first"),
            })
        )  # fmt: skip
        return op_id

    def _operand(self, name: str, mode: Any) -> Operand:
        return Operand(
            name=mode, tensor=self._tensor_of[name], version=self._version(name), mode=mode,
            slot=f"device.{name}",
        )  # fmt: skip

    def _version(self, name: str) -> int:
        return self._versions[self._tensor_of[name]]

    def schedule(self) -> RankSchedule:
        tensors, slots = tuple(self._tensors.values()), tuple(self._slots)
        ops = derive_waits(tuple(self.ops), tensors, slots)
        return sketch(ops, tensors=tensors, slots=slots, calls={})


def among_equals(mesh: Mesh, talk: Talk) -> Schedule:
    """One class of all ranks, whose messages go round in rings."""
    order, sends = [], {}
    for op in talk.ops:
        if op.kind != "communicate":
            continue
        if op.collective == "send":
            sends[op.axes, op.shift, op.sequence] = op.op_id
        elif op.collective == "recv":
            sent = sends[op.axes, -op.shift, op.sequence]
            order.append([("all", sent), ("all", op.op_id)])
        else:
            order.append([("all", op.op_id)])
    classes = [RankClass(name="all", schedule="all", cells={})]
    return cluster_of(mesh, classes, {"all": talk.schedule()}, order)


def value(rank: int, source: str, number: int, count: int, dtype: str) -> torch.Tensor:
    """What a rank is fed in a pass: of such different sizes that the order of a sum shows."""
    seed = rank + 97 * number + sum(ord(letter) for letter in source)
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-6, 7, (count,), generator=generator)
    return (torch.randn(count, generator=generator) * 2.0**powers).to(DTYPES[dtype])


def fed(part: RankPart) -> RankInputs:
    tensors = {tensor.tensor_id: tensor for tensor in part.schedule.tensors}

    def feed(op: Feed, number: int) -> torch.Tensor:
        tensor = tensors[op.tensor]
        found = value(part.rank, op.source, number, tensor.shape[0], tensor.dtype)
        return found.view(torch.uint8)

    return RankInputs.of_feed(feed)


def taken(outcome: RankOutcome, sink: str, number: int, dtype: str = "float32") -> torch.Tensor:
    """What a rank's host took."""
    (found,) = (f for f in outcome.fetched if f.sink == sink and f.pass_number == number)
    return found.values.view(DTYPES[dtype])

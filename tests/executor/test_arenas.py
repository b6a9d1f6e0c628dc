"""Views of tensors in their slots."""

import torch

from tests.helpers.sketches import sketch
from twinstream.executor.memory.arenas import Arenas
from twinstream.schedule.ops import Compute, Copy, Label, Operand, Stream
from twinstream.schedule.tensors import DEVICE, HOST, Slot, Tensor


def tensor(name: str, size: int, parent: str | None = None, offset: int = 0) -> Tensor:
    return Tensor(
        tensor_id=name, size_bytes=size, role="context", dtype="uint8", shape=(size,),
        parent=parent, offset_bytes=offset,
    )  # fmt: skip


TENSORS = (
    tensor("x", 700),
    tensor("x.0", 200, "x", 0),
    tensor("x.1", 200, "x", 256),
    tensor("x.2", 100, "x", 512),
)
SLOTS = (
    Slot(slot_id="whole", tier=DEVICE, offset_bytes=256, size_bytes=700),
    Slot(slot_id="tail", tier=DEVICE, offset_bytes=1024, size_bytes=444, origin_bytes=256),
    Slot(slot_id="home", tier=HOST, offset_bytes=0, size_bytes=700),
)
COPY = Copy(
    op_id="copy", stream=Stream(queue="h2d"), tensor="x", version=0, source="home",
    destination="whole", num_parts=2,
)  # fmt: skip
TASK = Compute(
    op_id="task",
    stream=Stream(queue="compute"),
    task="task",
    call="call",
    operands=(
        Operand(name="context", tensor="x", version=0, mode="read", num_parts=2, slot="whole"),
        Operand(name="own", tensor="x.2", version=1, mode="write", slot="tail"),
    ),
    label=Label(kind="task"),
)
SCHEDULE = sketch([COPY, TASK], tensors=TENSORS, slots=SLOTS)


def counted() -> tuple[Arenas, dict[str, torch.Tensor]]:
    """Arenas whose bytes tell where they are."""
    memory = {
        tier: (torch.arange(size) // 4).to(torch.uint8)
        for tier, size in Arenas.sizes(SCHEDULE).items()
    }
    return Arenas(SCHEDULE, memory), {tier.kind: flat for tier, flat in memory.items()}


def test_a_tensor_lies_at_its_offset_within_the_root_less_the_origin_of_the_slot():
    arenas, memory = counted()
    device = memory["device"]
    assert torch.equal(arenas.view("x", "whole"), device[256:956])
    assert torch.equal(arenas.view("x.1", "whole"), device[512:712])
    assert torch.equal(arenas.view("x.1", "tail"), device[1024:1224])
    assert torch.equal(arenas.view("x.2", "tail"), device[1280:1380])
    assert torch.equal(arenas.view("x.2", "home"), memory["host"][512:612])


def test_the_first_parts_reach_to_the_end_of_the_last_of_them():
    arenas, memory = counted()
    assert torch.equal(arenas.view("x", "whole", 2), memory["device"][256 : 256 + 456])


def test_a_kernel_gets_its_operands_by_name_with_their_modes():
    arenas, memory = counted()
    operands = arenas.operands(TASK)
    assert {name: o.mode for name, o in operands.items()} == {"context": "read", "own": "write"}
    assert torch.equal(operands["context"].bytes, memory["device"][256:712])
    assert torch.equal(operands["own"].bytes, memory["device"][1280:1380])

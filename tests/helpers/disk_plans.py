"""Plans of a small model whose frozen base is in part at home on a disk."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

from tests.helpers.tiny_chains import small
from twinstream.hardware_profiles.loader import load_machine
from twinstream.hardware_profiles.overrides import override
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.recipes.lora import lora_of
from twinstream.models.recipes.recipe import KernelChoice, Recipe
from twinstream.planner.choices import Choices
from twinstream.planner.planner import Planner
from twinstream.planner.request import PlanRequest, TrainingStep, with_drive
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.ops import Compute, Copy
from twinstream.simulator.replay import steady_state

TRAINED = Recipe(kernels=KernelChoice())
UPDATES_FIRST = Recipe(kernels=KernelChoice(), clips=True, optimizer="device_before_next_use")
LORA = Recipe(lora=lora_of("r=2"), kernels=KernelChoice())
SPEC = small("tiny", num_layers=4, d_model=64, d_ff=128)


def machine_with_disk(bytes_per_s: float = 1e9) -> Machine:
    """The CPU with a drive whose reads take 0.1 ms beside their bytes."""
    cpu = load_machine("cpu")
    return override(cpu, {"disk_read_bytes_per_s": bytes_per_s, "disk_latency_ns": 1e5})


def disk_request(
    device_mem: str = "700KiB",
    host_mem: str = "500KiB",
    bytes_per_s: float = 1e9,
    *,
    disk_mem: str = "1GiB",
    tokens: int = 64,
    chunk_tokens: int | None = None,
) -> PlanRequest:
    """A LoRA step of a model of 4 layers, 150 KB each, within caps."""
    chunks = None if chunk_tokens is None else 1
    step = TrainingStep(32, tokens, chunk_tokens, chunks, recipe=LORA)
    return PlanRequest.of(
        SPEC, machine_with_disk(bytes_per_s), step=step, device_mem=device_mem, host_mem=host_mem,
        disk_mem=disk_mem, choices=Choices(effort="quick"),
    )  # fmt: skip


def disk_plan(
    device_mem: str = "700KiB",
    host_mem: str = "500KiB",
    bytes_per_s: float = 1e9,
    *,
    tokens: int = 64,
    chunk_tokens: int | None = None,
) -> RankSchedule:
    """Its plan, proven."""
    request = disk_request(
        device_mem, host_mem, bytes_per_s, tokens=tokens, chunk_tokens=chunk_tokens
    )
    return planned_with_disk(request)


def written_request(  # noqa: PLR0913
    device_mem: str = "900KiB",
    host_mem: str = "1300KiB",
    rates: str = "1GB/s,500MB/s",
    *,
    tokens: int = 64,
    recipe: Recipe = TRAINED,
    num_layers: int = 4,
    chunks: int = 1,
) -> PlanRequest:
    """A step that trains all of the model, 600 KB a layer with optimizer and gradients, beside a
    drive that may be written."""
    step = TrainingStep(32, tokens, 32, chunks, recipe=recipe)
    spec = small("tiny", num_layers=num_layers, d_model=64, d_ff=128)
    return PlanRequest.of(
        spec, with_drive(load_machine("cpu"), rates), step=step, device_mem=device_mem,
        host_mem=host_mem, disk_mem="1GiB", choices=Choices(effort="quick"),
    )  # fmt: skip


def planned_with_disk(request: PlanRequest) -> RankSchedule:
    """The plan of a request, proven."""
    return Planner(steady_state).plan(request, name_caps=False).only


def written_plan(*caps: str, **given: Any) -> RankSchedule:
    """The plan of `written_request`, whose arguments these are."""
    return planned_with_disk(written_request(*caps, **given))


def without_disk(request: PlanRequest) -> PlanRequest:
    """The same, of a machine without a drive."""
    caps = request.caps.model_copy(update={"disk_bytes": None})
    return replace(request, caps=caps)


def of_rounds(plan: RankSchedule, queue: str) -> list[list[tuple[str, str]]]:
    """Of each round but the last the tensors that a disk's queue copies, with their host slots."""
    begins = [
        at for at, op in enumerate(plan.ops)
        if isinstance(op, Compute) and op.label.kind == "embed_forward" and op.label.chunk == 0
    ]  # fmt: skip
    return [
        [
            (op.tensor, op.destination if queue == "disk_read" else op.source)
            for op in plan.ops[low:high]
            if isinstance(op, Copy) and op.stream.queue == queue
        ]
        for low, high in pairwise(begins)
    ]

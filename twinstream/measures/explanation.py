"""Explain in numbers what a plan does and what limits it, for the screen of `twinstream plan`."""

from pydantic import NonNegativeInt

from twinstream.hardware_profiles.schema import Machine
from twinstream.measures.metrics import copied_bytes, executed_flops
from twinstream.measures.residence import Residence, residence
from twinstream.schedule.analysis.idle import exposed_times, idle_by_queue, idle_intervals
from twinstream.schedule.document import RankSchedule, Schedule, StepBound
from twinstream.schedule.errors import require
from twinstream.schedule.node import Node
from twinstream.schedule.timeline import Timeline

DEVICE_MEMORY, HOST_MEMORY = "device memory", "host memory"


class Recomputed(Node):
    """The number of the step's blocks (a layer of a chunk) that each saved level is recomputed for.

    `fraction_of_flops` is the share of all matmul and attention FLOPs executed.
    """

    fraction_of_flops: float
    num_blocks: NonNegativeInt
    num_blocks_by_level: dict[str, int]


class Price(Node):
    """The gain by one more unit (a GiB of a memory, a GB/s of a link), to first order.

    The seconds are the price in the lower bound; tokens/s = seconds x tokens / step time squared.
    """

    what: str
    saves_s_per_step: float
    adds_tokens_per_s: float


class Explanation(Node):
    """Why a step takes as long as it does.

    `limits` name what the lower bound hangs on: resources, and memories whose price is not zero.
    `compute_idle_fraction` is the share of a step in which the device's compute stream waited, by
    the queue of the op it waited for (`latency`: for none), in the last pass of the timeline;
    `step_fractions` are the same by cause, beside `compute`.
    `copied_bytes` are per step, by queue. Limits and prices are empty where the machine is not the
    one that the schedule was planned for.
    """

    limits: tuple[str, ...]
    compute_idle_fraction: dict[str, float]
    step_fractions: dict[str, float]
    copied_bytes: dict[str, int]
    recomputed: Recomputed
    residence: Residence
    prices: tuple[Price, ...]


def explain(schedule: Schedule, timeline: Timeline, machine: Machine) -> Explanation:
    """Say what limits one device's schedule, what it moves, recomputes and keeps where, the prices.

    Raises:
        ArgumentError: the schedule is of ranks of a layout.
        TimelineMismatch: the timeline is of another schedule.
    """
    require("schedule", schedule, Schedule)
    require("timeline", timeline, Timeline)
    require("machine", machine, Machine)
    own, line = schedule.only, timeline.only
    bound = own.bound if schedule.machine.content_hash == machine.content_hash else None
    idle = idle_by_queue(idle_intervals(schedule, timeline))
    (exposed,) = exposed_times(schedule, timeline)
    last_ns = max(1, exposed.step_ns)
    return Explanation(
        limits=limits_of(bound) if bound else (),
        compute_idle_fraction={cause: ns / last_ns for cause, ns in sorted(idle.items())},
        step_fractions=exposed.fractions,
        copied_bytes=copied_bytes(own),
        recomputed=_recomputed(own),
        residence=residence(own, line),
        prices=_prices(bound, own, line.step_ns / 1e9) if bound else (),
    )


def limits_of(bound: StepBound) -> tuple[str, ...]:
    """Resources without which the bound would be lower, memories among them."""
    priced = {DEVICE_MEMORY: bound.device_s_per_gib, HOST_MEMORY: bound.host_s_per_gib}
    return (*bound.limits, *(name for name, price in priced.items() if price > 0))


def _recomputed(schedule: RankSchedule) -> Recomputed:
    levels: dict[str, int] = {}
    num_blocks = 0
    for op in schedule.ops:
        if op.kind != "compute":
            continue
        num_blocks += op.label.kind == "block_forward"
        if op.label.kind == "block_recompute":
            level = op.label.level or "unnamed"
            levels[level] = levels.get(level, 0) + 1
    executed, again = executed_flops(schedule)
    return Recomputed(
        fraction_of_flops=again / executed,
        num_blocks=num_blocks,
        num_blocks_by_level=levels,
    )


def _prices(bound: StepBound, schedule: RankSchedule, step_s: float) -> tuple[Price, ...]:
    saved_s = {
        f"GiB of {DEVICE_MEMORY}": bound.device_s_per_gib,
        f"GiB of {HOST_MEMORY}": bound.host_s_per_gib,
        **{f"GB/s of {link}": price for link, price in bound.link_s_per_gb_per_s.items()},
    }
    tokens = schedule.workload.tokens_per_step
    return tuple(
        Price(
            what=what,
            saves_s_per_step=max(0.0, price),
            adds_tokens_per_s=max(0.0, price) * tokens / step_s / step_s,  # its square may be 0
        )
        for what, price in saved_s.items()
    )

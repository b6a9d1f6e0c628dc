"""Tell what a step on this GPU loses because an attention library is not installed."""

from collections import Counter

from twinstream.hardware_profiles.attention_rates import attention_ratio
from twinstream.hardware_profiles.cost import work_time
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.kernel_costs.attention_limits import attention_limits
from twinstream.planner.kernel_choice import faster_attention
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.ops import Compute


def missing_attention_notes(schedule: RankSchedule, machine: Machine) -> tuple[str, ...]:
    """Name a faster attention that is not installed here, and the share of compute that it costs.

    Nothing where nothing faster is usual on such GPUs, or it is not known how much faster it is.
    """
    attributes = (call.attributes.get("attention") for call in schedule.calls.values())
    chosen = next((name for name in attributes if isinstance(name, str)), None)
    dtype, head_dim = (schedule.model.spec.get(name) for name in ("dtype", "head_dim"))
    if chosen is None or not isinstance(dtype, str) or not isinstance(head_dim, int):
        return ()
    faster = faster_attention(machine, dtype, head_dim, chosen)
    if faster is None:
        return ()
    lost, source = _lost_share(schedule, machine, faster)
    library = attention_limits(faster).library
    assert library is not None, "what is missing is a library"
    if source is None:
        return ()
    return (
        f"{library.missing()}: with attention {chosen} in place of {faster} compute takes about "
        f"{lost:.0%} longer, an assumed ratio ({source}).",
    )


def _lost_share(schedule: RankSchedule, machine: Machine, faster: str) -> tuple[float, str | None]:
    """How much longer compute takes, as a share of what it would; and what says so."""
    times = Counter(op.call for op in schedule.ops if isinstance(op, Compute))
    total_ns = saved_ns = 0.0
    source = None
    capability = machine.compute_capability.major if machine.compute_capability else None
    for name, number in times.items():
        for work in schedule.calls[name].cost:
            alone_ns = number * work_time(work, machine).alone_ns
            total_ns += alone_ns
            if work.implementation is not None and work.unit.startswith("attention"):
                ratio = attention_ratio(work.unit, faster, work.implementation, capability)
                source = source or ratio.source
                saved_ns += alone_ns * (1 - 1 / ratio.value)
    return (saved_ns / (total_ns - saved_ns) if total_ns else 0.0), source

"""What a run cost beside the training, for people: host time, device memory."""

from twinstream.schedule.sizes import gib
from twinstream.schedule.timeline import DeviceMemory, HostCost, Provenance


def provenance_lines(provenance: Provenance) -> list[str]:
    """A line for each thing that was measured beside the steps."""
    lines = []
    if provenance.host_cost is not None:
        lines.append(_host_line(provenance.host_cost))
    if provenance.device_memory is not None:
        lines.append(_memory_line(provenance.device_memory))
    return lines


def _host_line(cost: HostCost) -> str:
    calls = ", ".join(
        f"{cost.calls_per_pass[kind]:.0f} {kind} at {ns / 1e3:.1f} us"
        for kind, ns in sorted(cost.ns_per_call.items())
    )
    timed = ", every op timed" if cost.ops_timed else ""
    return (
        f"Host: {cost.ns_per_op / 1e3:.1f} us to enqueue an op (a step: {calls}{timed}); it was "
        f"blocked {cost.waited_ns_per_pass / 1e6:.1f} ms of a step, waiting for the device or for "
        "data."
    )


def _memory_line(memory: DeviceMemory) -> str:
    beside = memory.peak_bytes - memory.arena_bytes
    line = (
        f"Device memory by the driver: peak {gib(memory.peak_bytes)}, of which {gib(beside)} "
        f"beside the arena ({gib(memory.libraries_bytes)} of them workspaces and temporaries of "
        f"libraries); the plan reserves {gib(memory.reserve_bytes)}."
    )
    if memory.undeclared_bytes:
        greediest = max(memory.temporary_bytes, key=lambda call: memory.temporary_bytes[call])
        line += (
            f" '{greediest}' allocates {gib(memory.temporary_bytes[greediest])} for itself, "
            f"{gib(memory.undeclared_bytes)} more than the plan declares; the reserve must hold it."
        )
    if memory.excess_bytes:
        line += (
            f" The cap is exceeded by {gib(memory.excess_bytes)}: raise device_reserve_bytes in "
            "the machine's profile and plan again, or give a smaller --device-mem."
        )
    return line

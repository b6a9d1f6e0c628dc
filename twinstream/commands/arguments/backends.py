"""Which backend runs, and which machine's profile goes with it."""

from twinstream.api import require_torch
from twinstream.hardware_profiles.loader import load_machine, machine_names
from twinstream.hardware_profiles.schema import Machine, Number
from twinstream.schedule.document import RankSchedule

_UNKNOWN = Number(kind="unconstrained", source="no machine was given")
UNKNOWN_PEAK = Machine(
    name="unknown",
    description="A machine whose peak nobody gave.",
    device="cpu",
    peak_bf16_flop_per_s=_UNKNOWN,
    peak_fp32_flop_per_s=_UNKNOWN,
)


def backend_named(name: str) -> str:
    """`cpu` or `cuda`; `auto` is CUDA where there is one.

    Raises:
        TwinstreamError: there is no torch, no CUDA, or no such backend.
    """
    require_torch()
    from twinstream.executor.run.execute import choose_backend

    return choose_backend(name)


def peak_machine(schedule: RankSchedule, given: str | None, backend: str) -> Machine | None:
    """The machine whose peak a measured MFU is of.

    The one given, else the shipped one that the schedule was planned for, where it is of the
    backend's kind; else nobody knows.
    """
    if given is not None:
        machine = load_machine(given)
        return machine if machine.device == backend else None
    if schedule.machine.name not in machine_names():
        return None
    machine = load_machine(schedule.machine.name)
    return machine if machine.device == backend else None

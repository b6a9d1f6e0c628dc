"""What a plan writes to a drive, beside what its maker warrants to be written."""

from twinstream.hardware_profiles.schema import Machine
from twinstream.measures.residence import moved_bytes
from twinstream.schedule.document import Schedule
from twinstream.schedule.ops import DISK_WRITE
from twinstream.schedule.sizes import gib

_ASSUMED_BYTES = 600e12  # consumer drives of 1 TB: 300 to 600 TB
_DAY_S = 86_400.0


def written_bytes(schedule: Schedule) -> int:
    """Return the bytes that all ranks together write to a drive in a step."""
    return sum(
        schedule.num_ranks(one) * size
        for one in schedule.classes
        for (_, way), size in moved_bytes(schedule.of(one)).items()
        if way == DISK_WRITE
    )


def wear_notes(schedule: Schedule, machine: Machine, step_s: float) -> list[str]:
    """Say how long the drive's rated endurance lasts at a plan's speed; nothing of one that writes
    nothing there.

    Args:
        machine: whose `disk_endurance_bytes` is the endurance; without it 600 TB are assumed.
        step_s: seconds of a step.
    """
    written = written_bytes(schedule)
    if not written or not step_s:
        return []
    number = machine.disk_endurance_bytes
    known = None if number is None else number.value
    endurance = known or _ASSUMED_BYTES
    a_day = written / step_s * _DAY_S
    days = endurance / a_day
    lasts = f"{days / 365:,.1f} years" if days > 365 else f"{days:,.1f} days"
    assumed = "" if known else ", assumed (state --disk-tbw),"
    return [
        f"Writes {gib(written)} a step to the drive, {a_day / 1e12:,.2f} TB a day beside "
        f"checkpoints: a rated endurance of {endurance / 1e12:,.0f} TB{assumed} lasts {lasts}."
    ]

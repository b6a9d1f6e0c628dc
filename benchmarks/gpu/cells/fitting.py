"""A cell on the memory that a device has."""

from dataclasses import replace

from benchmarks.gpu.jobs.campaign import Cell
from twinstream.hardware_profiles.schema import Machine
from twinstream.schedule.sizes import gib

_FREE_BYTES = 2**29  # of a device stay unplanned: the driver has some MiB of them
_NEARLY = 1.02  # a cell that wants so little more than the device has is run with what there is


def fitting_cell(cell: Cell, machine: Machine) -> Cell | str:
    """The cell with at most what the device has but for half a GiB; why not, where that is far."""
    number = machine.device_memory_bytes
    if number is None or number.value is None or cell.device_bytes is None:
        return cell
    if cell.device_bytes > _NEARLY * number.value:
        return f"this device has {gib(number.value)}"
    most_bytes = int(number.value - min(_FREE_BYTES, number.value / 16))
    return cell if cell.device_bytes <= most_bytes else replace(cell, device_bytes=most_bytes)

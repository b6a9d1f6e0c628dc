"""The error of a stage that does not fit even with offload, with what would."""

from collections.abc import Mapping

from twinstream.schedule.document import Caps, Schedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.ops import Communicate, Compute
from twinstream.schedule.sizes import gib


def bytes_by_role(schedule: Schedule) -> dict[str, int]:
    """Of the slots of a stage with everything on the device, by class of tensor."""
    roles = {tensor.tensor_id: tensor.role for tensor in schedule.tensors}
    sizes = {slot.slot_id: slot.size_bytes for slot in schedule.slots}
    found: dict[str, int] = {}
    for op in schedule.ops:
        if not isinstance(op, Compute | Communicate):
            continue
        for operand in op.operands:
            size = sizes.pop(operand.slot, 0)
            if size:
                role = roles[operand.tensor]
                found[role] = found.get(role, 0) + size
    return found


class OffloadError(TwinstreamError):
    """A stage fits neither the device nor, with the host's help, both memories.

    `role_bytes` is what it takes with everything on the device; `least_device_bytes` and
    `least_host_bytes` are caps below which nothing fits, the other cap as it is (None where no
    size would do).
    """

    def __init__(
        self,
        name: str,
        caps: Caps,
        role_bytes: Mapping[str, int],
        least_device_bytes: int | None,
        least_host_bytes: int | None,
    ) -> None:
        self.role_bytes = role_bytes
        self.least_device_bytes, self.least_host_bytes = least_device_bytes, least_host_bytes
        needs = ", ".join(f"{role} {gib(size)}" for role, size in role_bytes.items())
        has = " and ".join(
            f"{gib(size)} of {memory} memory"
            for memory, size in (("device", caps.device_bytes), ("host", caps.host_bytes))
            if size is not None
        )
        least = [
            f"{gib(size)} of {memory} memory a GPU"
            for memory, size in (("device", least_device_bytes), ("host", least_host_bytes))
            if size is not None
        ]
        super().__init__(
            f"{name} does not fit, not even with offload: a GPU has {has}, and the stage takes "
            f"{needs}. "
            + (f"It takes at least {' or '.join(least)}, the other as it is. " if least else "")
            + "More stages or shards (--zero, --dp), smaller microbatches or recompute take less."
        )

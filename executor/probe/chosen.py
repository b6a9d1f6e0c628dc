"""The kernels that were chosen for a device."""

from pydantic import NonNegativeInt

from twinstream.models.recipes.recipe import KernelChoice
from twinstream.schedule.node import Node


class Chosen(Node):
    """The kernels that are right and fastest on the device, and what there is to say of others.

    `excess_bytes` of device memory are what they take beyond what plans count with. `others` are
    attentions that are right too, but not deterministic.
    """

    kernels: KernelChoice
    notes: tuple[str, ...] = ()
    excess_bytes: NonNegativeInt = 0
    others: tuple[str, ...] = ()

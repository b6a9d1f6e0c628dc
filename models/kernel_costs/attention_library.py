"""The memory that the libraries of a kernel's call allocate by themselves, outside the arenas."""

from collections.abc import Mapping

from twinstream.models.kernel_costs.attention_limits import attention_limits
from twinstream.models.kernel_costs.attention_shape import AttentionPass
from twinstream.models.kernel_costs.attributes import TEMPORARY_BYTES, typed_attribute
from twinstream.models.kernel_costs.workspace import attention_shape
from twinstream.schedule.ops import KernelCall

# The kernels that call attention, and what of it.
_PASS_OF: Mapping[str, AttentionPass] = {
    "block_forward": "forward",
    "block_recompute_input": "forward",
    "block_backward": "backward",
}


def library_bytes(call: KernelCall) -> int:
    """Return the bytes beside the arenas that one call takes at most: attention's, and a module's.

    Raises:
        TwinstreamError: an attribute of the call is missing, or its attention is unknown.
    """
    if TEMPORARY_BYTES in call.attributes:
        return typed_attribute(call.attributes, TEMPORARY_BYTES, int)
    of_pass = _PASS_OF.get(call.kernel.split("/")[0])
    if of_pass is None:
        return 0
    name = typed_attribute(call.attributes, "attention", str)
    return attention_limits(name).allocates(of_pass, attention_shape(call.attributes))

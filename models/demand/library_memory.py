"""What a kernel's libraries allocate by themselves, outside the arenas, while it runs."""

from twinstream.models.demand.attention_library import attention_library_bytes
from twinstream.models.demand.attention_shape import AttentionPass
from twinstream.models.demand.workspace import attention_shape, typed_attribute
from twinstream.schedule.ops import KernelCall

# The kernels that call attention, and what of it.
_ATTENTION: dict[str, AttentionPass] = {
    "block_forward": "forward",
    "block_recompute_input": "forward",
    "block_backward": "backward",
}


def library_bytes(call: KernelCall) -> int:
    """Bytes beside the arenas that one call takes at most; today only attention takes any.

    Raises:
        TwinstreamError: an attribute of the call is missing, or its attention is unknown.
    """
    of_pass = _ATTENTION.get(call.kernel.split("/")[0])
    if of_pass is None:
        return 0
    name = typed_attribute(call.attributes, "attention", str)
    return attention_library_bytes(name, of_pass, attention_shape(call.attributes))

"""The part of the device cap that kernels' libraries take by themselves."""

from twinstream.models.library_memory import library_bytes
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps


def with_library_memory(caps: Caps, chain: Chain) -> Caps:
    """The caps with what the largest call of the chain takes beside the arena.

    Kernels run one after the other and give back what they took.
    """
    largest = max((library_bytes(call) for call in chain.calls.values()), default=0)
    if largest == caps.library_bytes:
        return caps
    return caps.model_copy(update={"library_bytes": largest})

"""The part of the device cap that kernels' libraries take by themselves."""

from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps


def with_library_memory(caps: Caps, chain: Chain) -> Caps:
    """The caps with what the chain's kernels take beside the arena."""
    if chain.library_bytes == caps.library_bytes:
        return caps
    return caps.model_copy(update={"library_bytes": chain.library_bytes})

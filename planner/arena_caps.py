"""How many bytes the caps leave for the arenas of a chain, and whether that can be enough."""

from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps


def with_library_memory(caps: Caps, chain: Chain) -> Caps:
    """Return the caps with the memory that the chain's kernel libraries take beside the arena."""
    if chain.library_bytes == caps.library_bytes:
        return caps
    return caps.model_copy(update={"library_bytes": chain.library_bytes})


def _persistent_bytes(chain: Chain) -> int:
    """Return the bytes of all that persists, of tensors with parts those of the parts."""
    persistent, with_parts = set(chain.persistent), {t.parent for t in chain.tensors}
    return sum(
        t.size_bytes
        for t in chain.tensors
        if (t.parent or t.tensor_id) in persistent and t.tensor_id not in with_parts
    )


def is_hopeless(chain: Chain, caps: Caps) -> bool:
    """Whether both arenas together are smaller than all that persists."""
    caps = with_library_memory(caps, chain)
    arenas = [caps.arena_bytes("device"), caps.arena_bytes("host")]
    return None not in arenas and _persistent_bytes(chain) > sum(arena or 0 for arena in arenas)


def holds_all_state(chain: Chain, caps: Caps) -> bool:
    """Whether the device has room for what persists, at the least."""
    cap = with_library_memory(caps, chain).arena_bytes("device")
    return cap is None or _persistent_bytes(chain) <= cap

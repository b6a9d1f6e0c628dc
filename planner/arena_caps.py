"""How many bytes the caps leave for the arenas of a chain, and whether that can be enough."""

from twinstream.hardware_profiles.schema import Machine
from twinstream.planner.lifetimes.host_tasks import host_tasks
from twinstream.planner.lifetimes.uses import UnitMap, read_only_leaves
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


def is_hopeless(chain: Chain, caps: Caps, machine: Machine) -> bool:
    """Whether all memories together are smaller than all that persists; a drive that is not
    written has no more of it than parameters that are only read."""
    caps = with_library_memory(caps, chain)
    arenas = [caps.arena_bytes("device"), caps.arena_bytes("host")]
    if None in arenas:
        return False
    kept = _persistent_bytes(chain)
    if caps.disk_bytes is not None:
        on_disk = kept
        if machine.disk_write_bytes_per_s is None:
            sizes = {tensor.tensor_id: tensor.size_bytes for tensor in chain.tensors}
            on_disk = sum(sizes[leaf] for leaf in read_only_leaves(chain, UnitMap(chain)))
        kept -= min(on_disk, caps.disk_bytes)
    return kept > sum(arena or 0 for arena in arenas)


def holds_all_state(chain: Chain, caps: Caps) -> bool:
    """Whether the device has room for what persists and is not the host's own, at the least."""
    cap = with_library_memory(caps, chain).arena_bytes("device")
    if cap is None:
        return True
    sizes = {tensor.tensor_id: tensor.size_bytes for tensor in chain.tensors}
    state = {t.tensor_id for t in chain.tensors if t.role == "optimizer_state"}
    used = {operand.tensor for task in host_tasks(chain) for operand in task.operands}
    return _persistent_bytes(chain) - sum(sizes[name] for name in used & state) <= cap

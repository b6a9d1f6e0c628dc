"""Find where a schedule keeps tensors (at home on device or host) and which bytes it moves."""

from collections.abc import Iterator, Sequence
from typing import get_args

from pydantic import NonNegativeInt

from twinstream.models.layout import ADAPTERS
from twinstream.schedule.analysis.occupancy import memory_over_time
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.node import Node
from twinstream.schedule.ops import DISK_READ, DISK_WRITE, Compute, Copy
from twinstream.schedule.proof.accesses import AccessMap
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.tensors import DEVICE, DISK, HOST, TIERS, Role, Tier
from twinstream.schedule.timeline import RankTimeline

PARAMETERS = "param."  # begins the name of a group's
ROLES: tuple[Role, ...] = get_args(Role)
_WAYS = {
    ("host", "device"): "h2d", ("disk", "host"): DISK_READ, ("host", "disk"): DISK_WRITE,
}  # fmt: skip
STATE: tuple[Role, ...] = ("parameter", "gradient", "optimizer_state")


class RoleResidence(Node):
    """Bytes of one role: at the peaks, by home, and what copies move of them in one step.

    The peaks are the bytes alive at the moment when the most is alive on that memory in the last
    pass of the timeline, so those of all roles add up. The homes are of parameters, gradients and
    optimizer state only, each byte in one of them: `device_only_bytes` never lie on the host;
    `both_bytes` lie on both from step to step and are not loaded; `host_home_bytes` are all others:
    they are loaded from the host or used there; or `disk_home_bytes`, which are on a disk.
    """

    role: Role
    device_peak_bytes: NonNegativeInt
    host_peak_bytes: NonNegativeInt
    device_only_bytes: NonNegativeInt
    host_home_bytes: NonNegativeInt
    both_bytes: NonNegativeInt
    h2d_bytes: NonNegativeInt
    d2h_bytes: NonNegativeInt
    disk_home_bytes: NonNegativeInt = 0
    disk_read_bytes: NonNegativeInt = 0
    disk_written_bytes: NonNegativeInt = 0


class Residence(Node):
    """The roles, and what of the arenas no role takes at the peak: gaps between slots.

    Arena = sum of the roles' peaks + unused; the device's memory is its arena + the reserve of
    context and libraries.
    """

    roles: tuple[RoleResidence, ...]
    device_unused_bytes: NonNegativeInt
    host_unused_bytes: NonNegativeInt
    device_reserve_bytes: NonNegativeInt


def residence(schedule: RankSchedule, timeline: RankTimeline) -> Residence:
    """Return where the schedule keeps its tensors, by role; peaks are at the timeline's times.

    Raises:
        TwinstreamError: by the timeline's times more is alive at once than an arena holds.
    """
    device, host = (_at_peak(schedule, timeline, tier) for tier in (DEVICE, HOST))
    homes = _homes(schedule)
    moved = moved_bytes(schedule)
    roles = tuple(
        RoleResidence(
            role=role,
            device_peak_bytes=device.get(role, 0),
            host_peak_bytes=host.get(role, 0),
            device_only_bytes=homes.get((role, "device_only"), 0),
            host_home_bytes=homes.get((role, "host_home"), 0),
            both_bytes=homes.get((role, "both"), 0),
            h2d_bytes=moved.get((role, "h2d"), 0),
            d2h_bytes=moved.get((role, "d2h"), 0),
            disk_home_bytes=homes.get((role, "disk_home"), 0),
            disk_read_bytes=moved.get((role, DISK_READ), 0),
            disk_written_bytes=moved.get((role, DISK_WRITE), 0),
        )
        for role in ROLES
    )
    return Residence(
        roles=roles,
        device_unused_bytes=_unused_bytes(schedule, DEVICE, device),
        host_unused_bytes=_unused_bytes(schedule, HOST, host),
        device_reserve_bytes=schedule.caps.outside_arena_bytes,
    )


def _at_peak(schedule: RankSchedule, timeline: RankTimeline, tier: Tier) -> dict[Role, int]:
    samples = memory_over_time(schedule, timeline.passes[-1], tier)
    return max((sample.bytes_by_role for sample in samples), key=_total, default={})


def _unused_bytes(schedule: RankSchedule, tier: Tier, peak: dict[Role, int]) -> int:
    arena, alive = arena_bytes(schedule, tier), _total(peak)
    if alive > arena:
        raise TwinstreamError(
            f"by the timeline's times {alive:,} bytes are alive at once on the {tier.kind}, whose "
            f"arena has {arena:,}: an op starts before one that it waits for has ended; make the "
            "timeline again from this schedule"
        )
    return arena - alive


def _total(bytes_by_role: dict[Role, int]) -> int:
    return sum(bytes_by_role.values())


def _homes(schedule: RankSchedule) -> dict[tuple[Role, str], int]:
    """Bytes of the state, by role and home."""
    access_map = AccessMap(schedule.tensors, schedule.slots)
    kinds = [tier.kind for tier in access_map.tiers]
    carried: dict[str, set[int]] = {tier.kind: set() for tier in TIERS}
    for item in schedule.carried:
        tier, ranges = access_map.ranges(item.tensor, item.slot, None)
        carried[kinds[tier]].update(leaf for _, _, leaf in ranges)
    on_host, loaded, on_disk = set(carried["host"]), set[int](), set(carried["disk"])
    for op in schedule.ops:
        for access in access_map.of(op):
            if kinds[access.tier] == "host":
                on_host.add(access.leaf)
            elif kinds[access.tier] == "disk":
                on_disk.add(access.leaf)
            elif op.kind == "copy" and access.mode == "write":
                loaded.add(access.leaf)
    stays = (carried["device"] & carried["host"]) - loaded
    found: dict[tuple[Role, str], int] = {}
    for leaf, name in enumerate(access_map.leaves):
        tensor = access_map.tensors[name]
        if tensor.role in STATE:
            home = "both" if leaf in stays else "host_home" if leaf in on_host else "device_only"
            home = "disk_home" if leaf in on_disk else home
            key = tensor.role, home
            found[key] = found.get(key, 0) + tensor.size_bytes
    return found


def copied_sizes(schedule: RankSchedule) -> Iterator[tuple[Copy, int]]:
    """Every copy of one step, with the bytes it moves."""
    access_map = AccessMap(schedule.tensors, schedule.slots)
    for op in schedule.ops:
        if op.kind == "copy":
            low, high = access_map.extent(op.tensor, op.num_parts)
            yield op, high - low


def moved_bytes(schedule: RankSchedule) -> dict[tuple[Role, str], int]:
    """Bytes that copies move in one step, by role and direction; of a disk as its queues."""
    roles = {tensor.tensor_id: tensor.role for tensor in schedule.tensors}
    kinds = {slot.slot_id: slot.tier.kind for slot in schedule.slots}
    moved: dict[tuple[Role, str], int] = {}
    for op, size_bytes in copied_sizes(schedule):
        if kinds[op.source] == kinds[op.destination]:
            continue
        way = _WAYS.get((kinds[op.source], kinds[op.destination]), "d2h")
        key = roles[op.tensor], way
        moved[key] = moved.get(key, 0) + size_bytes
    return moved


def groups_on_disk(*schedules: RankSchedule, alone: bool = False) -> list[str]:
    """Return the groups of parameters that schedules of ranks only read, and have at home on a
    disk, whole or in part.

    Args:
        alone: leave out what is somewhere else, too, when a pass begins.
    """
    there, elsewhere = dict[str, None](), set[str]()
    for schedule in schedules:
        slots = {slot.slot_id for slot in schedule.slots if slot.tier == DISK}
        parents = {tensor.tensor_id: tensor.parent for tensor in schedule.tensors}
        made = {
            parents[operand.tensor] or operand.tensor
            for op in schedule.ops
            if isinstance(op, Compute)
            for operand in op.operands
            if operand.mode != "read"
        }
        for item in schedule.carried:
            name = parents[item.tensor] or item.tensor
            if name in made or not name.startswith(PARAMETERS):
                continue
            if item.slot in slots:
                there[name] = None
            else:
                elsewhere.add(name)
    found = [name for name in there if not (alone and name in elsewhere)]
    return [name.removeprefix(PARAMETERS) for name in found]


def checkpoint_bytes(schedule: RankSchedule) -> int:
    """Weights and optimizer state on the disk; with adapters theirs alone."""
    roles = ("parameter", "optimizer_state")
    whole = [t for t in schedule.tensors if t.parent is None and t.role in roles]
    sizes = {tensor.tensor_id: tensor.size_bytes for tensor in whole}
    return sum(sizes[name] for name in written_names(list(sizes)))


def written_names(carried: Sequence[str]) -> list[str]:
    """Return the carried tensors that a checkpoint has: all, or, where there are adapters, only
    these and what is trained whole beside them.

    >>> written_names(["param.0", "param.lora.0", "opt.lora.0"])
    ['param.lora.0', 'opt.lora.0']
    """
    groups = [name.partition(".")[2] for name in carried]
    if not any(group.startswith(ADAPTERS) for group in groups):
        return list(carried)
    has_state = {group for name, group in zip(carried, groups, strict=True)
                 if not name.startswith("param.")}  # fmt: skip
    return [name for name, group in zip(carried, groups, strict=True)
            if group.startswith(ADAPTERS) or group in has_state]  # fmt: skip

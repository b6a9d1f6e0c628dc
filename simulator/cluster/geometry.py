"""Which ranks of a mesh an op communicates with, and where they are."""

from math import prod

from twinstream.hardware_profiles.collectives.rank_group import RankGroup
from twinstream.schedule.cluster.cluster_schedule import RankClass
from twinstream.schedule.cluster.mesh import Mesh
from twinstream.schedule.ops import Communicate


def group_of(mesh: Mesh, one: RankClass, op: Communicate) -> RankGroup:
    """The group of an op of a class, with the groups beside it that use the same NICs.

    All groups of a node are taken to communicate at once, as equal schedules do. Of a message it
    is the two ranks; along a whole axis (a ring step) the pair that is farthest apart counts.
    """
    on_node = min(mesh.ranks_per_node, mesh.size)
    if not op.shift:
        ranks = prod(mesh.length(axis) for axis in op.axes)
        near = equally_near(ranks, mesh.ranks_on_a_node(op.axes))
        return RankGroup(ranks=ranks, ranks_per_node=near, sharing=max(1, on_node // near))
    (axis,) = op.axes
    size, stride = mesh.length(axis), mesh.stride(axis)
    cell = one.cell(axis, size)
    if len(cell) == size:
        near = mesh.ranks_on_a_node((axis,))
        inside, sharing = near == size, max(1, on_node // near)
    else:
        places = [
            at * stride // on_node == (at + op.shift) % size * stride // on_node for at in cell
        ]
        inside, sharing = all(places), min(on_node, stride)
    if inside:
        return RankGroup(ranks=2, ranks_per_node=2)
    return RankGroup(ranks=2, ranks_per_node=1, sharing=sharing)


def equally_near(ranks: int, near: int) -> int:
    """Ranks of a group on each of its nodes, where nodes and axes need not divide one another: at
    most as many as on rank 0's, and equally many.

    >>> equally_near(512, 72)
    64
    """
    return next(count for count in range(near, 0, -1) if ranks % count == 0)

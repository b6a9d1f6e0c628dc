"""Times of the algorithms of collectives, in closed form.

One rank sends `rate` bytes a nanosecond and receives as many at the same time; one step costs
`step_ns` beside its bytes. Bytes are nccl-tests' size S: the larger of what a rank gives and what
it receives. A collective's start is not in here.

Sources: Thakur, Rabenseifner, Gropp, Optimization of Collective Communication Operations in MPICH
(2005), for ring, pairwise and their alpha-beta costs; Sanders, Speck, Traeff, Two-tree algorithms
for full bandwidth broadcast, reduction and scan (2009); Klenk et al., An In-Network Architecture
for Accelerating Shared-Memory Multiprocessor Collectives (ISCA 2020), for in-switch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil, log2

from twinstream.hardware_profiles.clusters.curves import Collective


@dataclass(frozen=True)
class Link:
    """The link from one rank to the others: bytes per ns and direction, ns per step.

    `in_switch_rate`: bytes per ns of a rank while switches reduce and multicast; None where they
    do not.
    """

    rate: float
    step_ns: float
    in_switch_rate: float | None = None


Algorithm = Callable[[int, float, Link], float]


def ring(ranks: int, size_bytes: float, link: Link) -> float:
    """Reduce-scatter or all-gather: ranks - 1 steps of S / ranks.

    >>> ring(4, 400.0, Link(rate=1.0, step_ns=10.0))
    330.0
    """
    return (ranks - 1) * (link.step_ns + size_bytes / ranks / link.rate)


def ring_all_reduce(ranks: int, size_bytes: float, link: Link) -> float:
    """A reduce-scatter and an all-gather."""
    return 2 * ring(ranks, size_bytes, link)


def tree_all_reduce(ranks: int, size_bytes: float, link: Link) -> float:
    """Up and down a double binary tree, pipelined: every rank sends and receives 2 S."""
    return 2 * (ceil(log2(ranks)) * link.step_ns + size_bytes / link.rate)


def in_switch_all_reduce(ranks: int, size_bytes: float, link: Link) -> float:
    """Each rank has the switch reduce its share and send the result to all: S + S / ranks each way.

    The others read S of a rank's contribution while it sends its own share's result.
    """
    assert link.in_switch_rate is not None
    return 2 * link.step_ns + size_bytes * (1 + 1 / ranks) / link.in_switch_rate


def in_switch_half(ranks: int, size_bytes: float, link: Link) -> float:
    """Reduce-scatter (every rank's S is read once) or all-gather (every rank receives S)."""
    assert link.in_switch_rate is not None
    return link.step_ns + size_bytes / link.in_switch_rate


def pairwise(ranks: int, size_bytes: float, link: Link) -> float:
    """All-to-all: ranks - 1 messages of S / ranks, sent together: they share one start."""
    return link.step_ns + (ranks - 1) * size_bytes / ranks / link.rate


def message(ranks: int, size_bytes: float, link: Link) -> float:
    """Send and receive: S in one step, whoever else does so too."""
    return link.step_ns + size_bytes / link.rate


_BY_LINK: Mapping[Collective, Mapping[str, Algorithm]] = {
    "all_reduce": {"ring": ring_all_reduce, "tree": tree_all_reduce},
    "reduce_scatter": {"ring": ring},
    "all_gather": {"ring": ring},
    "all_to_all": {"pairwise": pairwise},
    "send_recv": {"message": message},
}
_IN_SWITCH: Mapping[Collective, Algorithm] = {
    "all_reduce": in_switch_all_reduce,
    "reduce_scatter": in_switch_half,
    "all_gather": in_switch_half,
}


def algorithms_of(collective: Collective, link: Link) -> dict[str, Algorithm]:
    """Return the algorithms that can carry a collective over a link, by name."""
    found = dict(_BY_LINK[collective])
    if link.in_switch_rate is not None and collective in _IN_SWITCH:
        found["in_switch"] = _IN_SWITCH[collective]
    return found

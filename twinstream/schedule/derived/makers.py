"""The ops that others need: all that made what they read, directly or not."""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet


def with_makers(wanted: Iterable[int], makers: Sequence[AbstractSet[int]]) -> set[int]:
    """Return these ops and all that made what they read.

    Args:
        makers: by op, the numbers of those that made what it reads.

    >>> sorted(with_makers([3], [set(), {0}, {0}, {1}]))
    [0, 1, 3]
    """
    found = set(wanted)
    left = list(found)
    while left:
        fresh = makers[left.pop()] - found
        found |= fresh
        left += fresh
    return found

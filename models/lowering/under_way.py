"""Sums over replicas that run beside the backward pass, and when their end is waited for."""

from collections import deque


class UnderWay:
    """Sums that may still be running, in the order in which they were issued.

    A sum is waited for once gradients of as many bytes have been completed after it as the largest
    sum before it has. Sums and backward passes both take time in proportion to bytes, and a large
    sum holds up those behind it; so nothing waits for a sum where backward passes take longer than
    sums, and where they do not, sums follow one another without a gap.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[str, int]] = deque()
        self._issued_bytes = self._largest_bytes = 0

    def issue(self, name: str, size_bytes: int) -> list[str]:
        """One more, when its gradient is complete; returns those that are waited for now.

        >>> sums = UnderWay()
        >>> [sums.issue(*one) for one in (("head", 25), ("2", 10), ("1", 10), ("0", 10))]
        [[], [], [], ['head']]
        """
        self._issued_bytes += size_bytes
        self._largest_bytes = max(self._largest_bytes, size_bytes)
        self._waiting.append((name, self._issued_bytes))
        due = []
        while self._issued_bytes - self._waiting[0][1] >= self._largest_bytes:
            due.append(self._waiting.popleft()[0])
        return due

    def finish(self) -> list[str]:
        """Those that are left."""
        due = [name for name, _ in self._waiting]
        self._waiting.clear()
        return due

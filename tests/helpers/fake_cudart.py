"""A driver of the tests that locks host memory: it can fail or be interrupted at a given call.

As CUDA's runtime does, it keeps the last error until someone takes it.
"""


class FakeCudart:
    """Locks ranges; fails or is interrupted at call number `at`."""

    def __init__(self, *, fails_at: int | None = None, interrupted_at: int | None = None) -> None:
        self.locked: dict[int, int] = {}
        self.asked: list[int] = []
        self.last_error = 0
        self._fails_at, self._interrupted_at = fails_at, interrupted_at

    def cudaHostRegister(self, pointer: int, size_bytes: int, flags: int) -> int:  # noqa: N802
        assert pointer % 4096 == 0
        self.asked.append(size_bytes)
        if len(self.asked) - 1 == self._fails_at:
            self.last_error = 2
            return 2
        self.locked[pointer] = size_bytes
        if len(self.asked) - 1 == self._interrupted_at:
            raise KeyboardInterrupt
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:  # noqa: N802
        if pointer not in self.locked:
            self.last_error = 713
            return 713
        del self.locked[pointer]
        return 0

    def clear_error(self) -> None:
        self.last_error = 0

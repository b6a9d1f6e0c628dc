"""Which rows of a table calibrate, decided by their configuration alone, before any result is seen.

The rule: seven pairs of cells. The models share the pairs, the one with the most successful rows
first; a model's pairs are at sequence lengths spread evenly over the list of its lengths, both
ends included (the middle one if it has a single pair); a pair is the length's successful row with
the smallest caps and the one with the largest, device cap first, then host cap.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from twinstream.hardware_profiles.errors import CalibrationError

MOST_CELLS = 14


class Configured(Protocol):
    """What the rule may look at: no measured figure."""

    @property
    def model(self) -> str: ...
    @property
    def seq_len(self) -> int: ...
    @property
    def host_mem_gib(self) -> float: ...
    @property
    def dev_mem_gib(self) -> float: ...
    @property
    def status(self) -> str: ...


_Row = TypeVar("_Row", bound=Configured)


def default_cells(rows: Iterable[_Row], most: int = MOST_CELLS) -> tuple[_Row, ...]:
    """The rows of one machine's table that calibrate it, at most `most`.

    Raises:
        CalibrationError: no row succeeded.
    """
    lengths: dict[str, dict[int, list[_Row]]] = {}
    for row in rows:
        if row.status == "ok":
            lengths.setdefault(row.model, {}).setdefault(row.seq_len, []).append(row)
    if not lengths:
        raise CalibrationError("the table has no successful row to calibrate with")
    chosen: dict[int, _Row] = {}
    for model, num_pairs in _shares(lengths, most // 2).items():
        for seq_len in _spread(sorted(lengths[model]), num_pairs):
            found = lengths[model][seq_len]
            for row in (min(found, key=_caps), max(found, key=_caps)):
                chosen[id(row)] = row
    return tuple(chosen.values())


def _shares(lengths: dict[str, dict[int, list[_Row]]], num_pairs: int) -> dict[str, int]:
    """How many pairs each model gets: one after the other, no more than it has lengths."""
    order = sorted(lengths, key=lambda m: (-sum(map(len, lengths[m].values())), m))
    shares = dict.fromkeys(order, 0)
    while num_pairs and any(shares[m] < len(lengths[m]) for m in order):
        for model in order:
            if num_pairs and shares[model] < len(lengths[model]):
                shares[model] += 1
                num_pairs -= 1
    return shares


def _spread(lengths: Sequence[int], count: int) -> list[int]:
    if count == 1:
        return [lengths[len(lengths) // 2]]
    last = len(lengths) - 1
    return [lengths[round(i * last / (count - 1))] for i in range(count)]


def _caps(row: Configured) -> tuple[float, float]:
    return row.dev_mem_gib, row.host_mem_gib

"""vTrain's published table of one node of A100s, and the times it was made of.

The table is what vTrain's own predictor said, on traces that are not published. The layers' times
are solved from it: together, forward and backward. Of embedding and head at micro-batch 8 and tp 8,
and of their updates, only sums or the larger show: there the times are one solution of many.
"""

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

DATA = Path(__file__).parents[2] / "data"
SEQ_LEN, BYTES = 1024, 2
LARGEST_MIB = 1024
GB_PER_S_AT_LARGEST = {2: 196.89, 4: 221.37, 8: 229.25}


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    global_batch: int
    micro_batch: int
    hidden: int
    num_layers: int
    tp: int
    dp: int
    pp: int
    iteration_ms: float

    @property
    def num_micro_batches(self) -> int:
        return self.global_batch // self.dp // self.micro_batch

    @property
    def layers_of_a_stage(self) -> int:
        return self.num_layers // self.pp

    @property
    def activation_bytes(self) -> int:
        return self.micro_batch * SEQ_LEN * self.hidden * BYTES


class LayerTimes(NamedTuple):
    """Forward and backward together, and weight update."""

    layer_ns: int
    embedding_ns: int
    head_ns: int
    layer_update_ns: int
    embedding_update_ns: int
    head_update_ns: int


def read_rows() -> list[Row]:
    lines = _lines("vtrain_iterations.csv")
    return [Row(*(int(x) for x in line[:-1]), float(line[-1])) for line in lines]


def _lines(name: str) -> list[list[str]]:
    with (DATA / name).open() as file:
        return list(csv.reader(line for line in file if line[0].isdigit()))


class VtrainTimes:
    """vTrain's tables: layers by (hidden, tp, micro_batch), all-reduces by (ranks, MiB)."""

    def __init__(self) -> None:
        layers = [[int(x) for x in line] for line in _lines("vtrain_layer_times.csv")]
        self._layers = {tuple(line[:3]): LayerTimes(*line[3:]) for line in layers}
        known = [[int(x) for x in line] for line in _lines("vtrain_all_reduce.csv")]
        self._all_reduces = {(ranks, size_mib): time_ns for ranks, size_mib, time_ns in known}

    def layers(self, row: Row) -> LayerTimes:
        return self._layers[row.hidden, row.tp, row.micro_batch]

    def all_reduce_ns(self, size_bytes: int, ranks: int) -> int:
        """What NCCL took at the nearest MiB, or the bytes at the largest one's bus bandwidth."""
        size_mib = round(size_bytes / 2**20)
        if size_mib > LARGEST_MIB:
            return round(size_mib / (GB_PER_S_AT_LARGEST[ranks] * 1024) * 1e9)
        return self._all_reduces[ranks, size_mib]

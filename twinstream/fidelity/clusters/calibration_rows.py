"""Which rows constants are fitted to: a rule that looks at configurations, never at times.

Stated before any result. Constants of a GPU type are fitted to the tables of many configurations
alone: of A100 vTrain's and MosaicML's, of H100 MosaicML's and dgxc-benchmarking's dense models. Of
these, families of runs (one configuration on however many GPUs) are taken whole: those whose name's
CRC-32 is divisible by three. All else is scored: two thirds of the families of these tables, and
every row of the papers, of MLPerf, of TorchTitan and of mixtures of experts, that no constant has
seen. The rule reads a row's own cells only, so that it says the same of a table with other rows.

Not all of these are simulated at each trial of a fit. Of a family with pipelines one run is, the
first on fewest GPUs; none is whose simulated microbatches pass over 3,000 layers (a ring's steps
count twice each), which take minutes. They stay unscored all the same.
"""

from collections.abc import Mapping, Sequence
from zlib import crc32

from twinstream.fidelity.clusters.tables.measured_row import ClusterRow

FITTED_SERIES: Mapping[str, tuple[str, ...]] = {
    "A100": (
        "vTrain multi",
        "mosaicml A100 80GB bf16_amp",
        "mosaicml A100 40GB bf16_pure",
    ),
    "H100": (
        "mosaicml H100 80GB bf16_amp",
        "mosaicml H100 80GB fp8_amp",
        "dgxc H100 bf16",
        "dgxc H100 fp8",
    ),
}
_ONE_IN = 3
_MOST_LAYERS = 3_000
_PIPELINE_ROUNDS = 5  # times its stages: as many microbatches as are simulated of a pipeline


def is_calibration(row: ClusterRow) -> bool:
    """Whether constants of the row's GPU type may be fitted to it."""
    return (
        row.scored
        and row.series in FITTED_SERIES.get(row.gpu, ())
        and crc32(row.family.encode()) % _ONE_IN == 0
    )


def fitted_rows(rows: Sequence[ClusterRow], gpu: str) -> tuple[ClusterRow, ...]:
    """The rows that a fit of the GPU type simulates, in the tables' order."""
    chosen = [row for row in rows if row.gpu == gpu and is_calibration(row)]
    taken: dict[str, ClusterRow] = {}
    for row in sorted(chosen, key=lambda row: row.num_gpus):
        if _pipelined(row):
            taken.setdefault(row.family, row)
    return tuple(
        row
        for row in chosen
        if (not _pipelined(row) or row is taken[row.family]) and _layers(row) <= _MOST_LAYERS
    )


def _pipelined(row: ClusterRow) -> bool:
    return row.job is not None and row.job.layout.pp > 1


def _layers(row: ClusterRow) -> int:
    """Layers that all simulated microbatches pass."""
    if row.job is None:
        return 0
    most = _PIPELINE_ROUNDS * row.job.layout.pp
    steps = 2 * row.job.layout.cp if row.job.layout.cp > 1 else 1
    return row.job.shape.num_layers * min(row.job.num_microbatches, most) * steps

"""Which rows constants are fitted to: a rule that looks at configurations, never at times.

Stated before any result. Constants of a GPU type are fitted to the tables of many configurations
alone: of A100 vTrain's and MosaicML's, of H100 MosaicML's and dgxc-benchmarking's dense models. Of
these, families of runs (one configuration on however many GPUs) are taken whole: those whose name's
CRC-32 is divisible by three. All else is scored: two thirds of the families of these tables, and
every row of the papers, of MLPerf, of TorchTitan and of mixtures of experts, that no constant has
seen. The rule reads a row's own cells only, so that it says the same of a table with other rows.
"""

from collections.abc import Mapping
from zlib import crc32

from twinstream.fidelity.cluster_rows import ClusterRow

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


def is_calibration(row: ClusterRow) -> bool:
    """Whether constants of the row's GPU type may be fitted to it."""
    return (
        row.scored
        and row.series in FITTED_SERIES.get(row.gpu, ())
        and crc32(row.family.encode()) % _ONE_IN == 0
    )

"""Reading a published table: which one it is, its columns say."""

from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.accuracy.published import dgxc, megatron_bridge, mlperf, mosaicml, papers, vtrain
from benchmarks.accuracy.published.activation_bytes import (
    ACTIVATION_SERIES,
    published_activation_bytes,
)
from benchmarks.accuracy.published.blind_test import is_calibration
from twinstream.fidelity.cluster_rows import ClusterRow
from twinstream.hardware_profiles.csv_table import Cells, ClusterTableError, read_lines

_KINDS: dict[str, tuple[Sequence[str], Callable[[Cells], ClusterRow]]] = {
    "vTrain's measured steps": (vtrain.COLUMNS, vtrain.row_of),
    "dgxc-benchmarking's step times": (dgxc.COLUMNS, dgxc.row_of),
    "MosaicML's FSDP benchmarks": (mosaicml.COLUMNS, mosaicml.row_of),
    "MLPerf Training's step times": (mlperf.COLUMNS, mlperf.row_of),
    "papers' tables": (papers.COLUMNS, papers.row_of),
    "Megatron-Bridge's performance pages": (megatron_bridge.COLUMNS, megatron_bridge.row_of),
}


def read_cluster_table(path: Path) -> tuple[ClusterRow, ...]:
    """The rows of a table, those that cannot be modelled included, with why.

    Raises:
        ClusterTableError: it is none of the known tables, has no rows, or a cell is wrong.
    """
    names, lines = read_lines(path)
    read = _KINDS[_kind(path, names)][1]
    if not lines:
        raise ClusterTableError(f"{path} has no rows under its header")
    rows = tuple(_with_rules(cells.valid(read)) for cells in lines)
    return megatron_bridge.one_a_configuration(rows) if read is megatron_bridge.row_of else rows


def read_cluster_tables(paths: Sequence[Path]) -> tuple[ClusterRow, ...]:
    """The rows of several tables, one after the other; raises as `read_cluster_table`."""
    return tuple(row for path in paths for row in read_cluster_table(path))


def _with_rules(row: ClusterRow) -> ClusterRow:
    told = row.job if row.series in ACTIVATION_SERIES else None
    published = None if told is None else published_activation_bytes(told)
    return row.model_copy(update={"calibrates": is_calibration(row), "activation_bytes": published})


def _kind(path: Path, names: Sequence[str]) -> str:
    """The table whose columns are all there; of the nearest one, what is missing."""
    if not names:
        raise ClusterTableError(f"{path} is empty; it needs a header of columns")
    missing = {
        kind: [column for column in columns if column not in names]
        for kind, (columns, _) in _KINDS.items()
    }
    if whole := [kind for kind in missing if not missing[kind]]:
        return whole[0]
    shares = {kind: len(missing[kind]) / len(_KINDS[kind][0]) for kind in _KINDS}
    nearest = min(shares, key=lambda kind: shares[kind])
    raise ClusterTableError(
        f"{path} is no table of measured steps: nearest are {nearest}, of which it lacks "
        f"{', '.join(missing[nearest])}"
    )

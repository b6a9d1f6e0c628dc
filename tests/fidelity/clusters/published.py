"""Rows of published tables, and a stand-in that predicts them from FLOPs alone."""

from collections.abc import Mapping
from pathlib import Path

from benchmarks.accuracy.published.reading import read_cluster_table
from twinstream.fidelity.cluster_rows import ClusterRow
from twinstream.fidelity.measured import Predicted

FEW = Path(__file__).parents[2] / "data" / "clusters"
TABLES = sorted(FEW.glob("*_few.csv"))


def rows_of(name: str) -> dict[str, ClusterRow]:
    """Rows of a table by what they are called."""
    return {row.row_id: row for row in read_cluster_table(FEW / f"{name}_few.csv")}


def flops(row: ClusterRow) -> float:
    """Of a step, attention left out: six for each matrix element and token."""
    assert row.job is not None
    shape = row.job.shape
    layer = 2 * shape.d_model * (shape.d_q + shape.d_kv) + 2 * shape.d_model * shape.d_ff
    return 6.0 * shape.num_layers * layer * row.tokens


def predicted_from_flops(row: ClusterRow, values: Mapping[str, float]) -> Predicted:
    """At a share of 312 TFLOP/s, and the gradients over a network of 100 GB/s at another share."""
    if row.job is None:
        return Predicted(refused=row.why_not)
    compute_s = flops(row) / row.num_gpus / (312e12 * values["sustained"])
    gradients = flops(row) / row.tokens / 3 / row.job.layout.tp / row.job.layout.pp
    network_s = gradients / (100e9 * values["network"])
    return Predicted(step_s=compute_s + network_s, fits=True, memory_bytes=1)

"""Writing the one table of measured steps that `twinstream validate` reads."""

import csv
import io
from collections.abc import Sequence

from twinstream.fidelity.cluster_rows import COLUMNS, ClusterRow
from twinstream.models.recipes.recipe import MATMULS_OF_PRECISION


def measured_steps_csv(rows: Sequence[ClusterRow]) -> str:
    """Write the table of rows, which `read_measured_steps` reads."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: _text(value) for name, value in _columns(row).items()})
    return text.getvalue()


def _columns(row: ClusterRow) -> dict[str, object]:
    told: dict[str, object] = {
        "row": row.row_id, "gpu": row.gpu, "num_gpus": row.num_gpus, "cluster": row.cluster,
        "step_time_s": row.measured_s, "series": row.series, "family": row.family,
        "calibrates": row.calibrates, "suspect": row.suspect, "scored": row.scored,
        "activation_bytes": row.activation_bytes, "note": row.note, "why_not": row.why_not,
        "framework": row.framework, "recompute_stated": row.recompute_stated,
        "reserved_bytes": row.reserved_bytes,
    }  # fmt: skip
    if row.compared is not None:
        told |= {
            "comparison": row.compared.kind, "set": row.compared.set, "rank": row.compared.rank
        }  # fmt: skip
    if (job := row.job) is not None:
        layout = job.layout.model_dump(exclude_defaults=True)
        if job.recipe.gradients == "model":
            layout["gradient_dtype"] = "bfloat16"
        kernels = job.recipe.implementations
        precisions = {m: name for name, m in MATMULS_OF_PRECISION.items() if name != "fp16"}
        told |= {
            "model": job.shape.model_dump_json(exclude_defaults=True),
            "layout": " ".join(f"{name}={_text(value)}" for name, value in layout.items()),
            "seq_len": job.seq_len, "global_batch": job.global_batch,
            "attention": kernels.attention,
            "precision": precisions[kernels.matmuls], "network_reduction": job.network_reduction,
        }  # fmt: skip
    return told


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)

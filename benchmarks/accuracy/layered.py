"""How far the arithmetic of layered models is off on published steps of decoders under FSDP.

    python -m benchmarks.accuracy.layered mosaicml_fsdp_h100_a100.csv

MosaicML's rows in 16 bits with one microbatch a step, all parameters sharded, none on the host.
"""

import csv
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean

from benchmarks.accuracy.published.published_models import published_shape
from twinstream.hardware_profiles.clusters.loader import load_cluster
from twinstream.layered.estimate import Question, mesh_of
from twinstream.layered.step import LayeredTask
from twinstream.models.layered.from_decoder import layered_decoder

_CLUSTERS = {"A100_40GB": "a100_40gb", "A100_80GB": "a100_dgx", "H100_80GB": "h100_dgx"}


def errors(path: Path) -> dict[str, list[float]]:
    """Return predicted / measured - 1 of the table's rows, by GPU."""
    found: dict[str, list[float]] = defaultdict(list)
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            seq_len = int(row["seq_len"])
            spec = published_shape(row["model"], seq_len)
            usual = (row["sharding"], row["cpu_offload"], row["grad_accum"])
            if spec is None or usual != ("full_shard", "false", "1"):
                continue
            if not row["precision"].startswith("bf16") or "suspect" in row["note"]:
                continue
            cluster = load_cluster(_CLUSTERS[row["gpu_type"]])
            recompute = row["activation_checkpointing"] == "true"
            task = LayeredTask(int(row["global_batch"]), recompute=recompute)
            mesh = mesh_of(cluster, int(row["num_gpus"]))
            asked = Question(layered_decoder(spec, seq_len), cluster, mesh, task)
            step_s = asked.estimate({"dense": ("fsdp",)}).step.step_ns / 1e9
            found[row["gpu_type"]].append(step_s / float(row["step_time_s"]) - 1)
    return found


if __name__ == "__main__":
    for gpu, found in errors(Path(sys.argv[1])).items():
        print(
            f"{gpu}: {len(found)} steps, mean {fmean(map(abs, found)):.1%}, bias "
            f"{fmean(found):+.1%}, worst {max(map(abs, found)):.1%}"
        )

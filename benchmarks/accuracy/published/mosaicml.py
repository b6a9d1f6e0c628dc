"""MosaicML's training benchmarks (llm-foundry): MPT under PyTorch FSDP.

Not stated there: the network of the H100 runs (taken: one NDR port a GPU), dropout (none), which
flash attention (flash-attn 2: the tables are of 2023 and 2024).
"""

from typing import Literal

from benchmarks.accuracy.published.published_models import published_shape
from twinstream.fidelity.cluster_rows import ClusterRow
from twinstream.hardware_profiles.csv_table import Cells
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import Layout
from twinstream.models.recipes.recipe import megatron_recipe

COLUMNS = (
    *("model", "gpu_type", "num_gpus", "seq_len", "micro_batch", "grad_accum", "global_batch"),
    *("precision", "sharding", "activation_checkpointing", "cpu_offload", "step_time_s", "note"),
)
_CLUSTERS = {"A100_40GB": "a100_40gb", "A100_80GB": "a100_dgx", "H100_80GB": "h100_dgx"}
_ZERO: dict[str, Literal[2, 3]] = {"full_shard": 3, "shard_grad_op": 2}


def row_of(cells: Cells) -> ClusterRow:
    """One line of the table."""
    model, gpu, precision = (cells.text(name) for name in ("model", "gpu_type", "precision"))
    seq_len, gpus = cells.count("seq_len"), cells.count("num_gpus")
    recompute = cells.flag("activation_checkpointing")
    micro, rounds = cells.count("micro_batch"), cells.count("grad_accum")
    sharding, note = cells.text("sharding"), cells.text("note")
    cluster, why_not = _CLUSTERS.get(gpu, ""), ""
    shape, zero = published_shape(model, seq_len), _ZERO.get(sharding)
    if shape is None or zero is None or not cluster:
        why_not = f"{model} on {gpu} with {sharding} is not known here"
    elif cells.flag("cpu_offload"):
        why_not = "parameters on the host, as FSDP offloads them"
    job = None
    if not why_not and shape is not None and zero is not None:
        job = Job(
            shape=shape,
            layout=Layout(
                dp=gpus,
                micro_batch=micro,
                zero=zero,
                recompute="full" if recompute else "none",
            ),
            seq_len=seq_len,
            global_batch=cells.count("global_batch"),
            recipe=megatron_recipe(
                "flash2",
                "fp8" if precision == "fp8_amp" else "bf16",
                "model" if precision == "bf16_pure" else "float32",
            ),
        )
    suspect = "suspect" in note
    told = f"{model} seq{seq_len} mb{micro}x{rounds}{' ac' if recompute else ''} {sharding}"
    return ClusterRow(
        series=f"mosaicml {gpu.replace('_', ' ')} {precision}",
        row_id=f"{told} {gpus}",
        family=f"mosaicml {gpu} {precision} {told}",
        gpu=gpu.split("_")[0],
        num_gpus=gpus,
        cluster=cluster or gpu,
        job=job,
        measured_s=cells.number("step_time_s"),
        note=note,
        suspect=suspect,
        scored=not (suspect or why_not),
        why_not=why_not or (note if suspect else ""),
        framework="torch_fsdp",
    )

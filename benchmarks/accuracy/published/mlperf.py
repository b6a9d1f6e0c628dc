"""MLPerf Training's logs: GPT-3 175B (v3.1, v4.0) and Llama 3.1 405B (v5.1).

Both count the embedding and the loss as layers where stages would be uneven; optimizers are
sharded, gradients reduced in bf16, attention is cuDNN's.
"""

from typing import Literal

from benchmarks.accuracy.published.published_models import (
    published_shape,
    weighted_stages,
)
from twinstream.fidelity.cluster_rows import ClusterRow, Compared
from twinstream.hardware_profiles.csv_table import Cells
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import Layout, Recompute
from twinstream.models.recipes.recipe import megatron_recipe

COLUMNS = (
    *("round", "benchmark", "system", "gpu_type", "num_gpus", "tp", "pp", "cp", "vp", "dp"),
    *("micro_batch", "global_batch", "seq_len", "precision", "recompute", "tp_comm_overlap"),
    "step_time_s",
)
_MODELS = {"gpt3": "gpt3-175b", "llama31_405b": "llama3.1-405b"}
_CLUSTERS = {"H100": "h100_dgx", "H200": "h200_dgx", "B200": "b200_dgx", "GB200": "gb200_nvl72",
             "GB300": "gb300_nvl72"}  # fmt: skip
_RECOMPUTE: dict[str, Recompute] = {"selective": "selective", "full": "full"}
_PRECISIONS: dict[str, Literal["fp8", "fp4", "bf16"]] = {
    "fp8": "fp8", "nvfp4": "fp4", "fp4": "fp4", "bf16": "bf16"
}  # fmt: skip


def row_of(cells: Cells) -> ClusterRow:
    """One line of the table."""
    benchmark, gpu, system = (cells.text(name) for name in ("benchmark", "gpu_type", "system"))
    precision, gpus = cells.text("precision"), cells.count("num_gpus")
    model = _MODELS.get(benchmark)
    why_not = "" if model else f"the model of the benchmark {benchmark} is not known here"
    if gpu not in _CLUSTERS:
        why_not = f"no cluster profile of {gpu}"
    if precision not in _PRECISIONS:
        why_not = f"precision {precision} is not known here"
    told = f"{cells.text('round')} {benchmark} {gpu} {precision}"
    scaling = Compared(kind="scaling", set=told, rank=gpus)
    return ClusterRow(
        series=f"MLPerf {benchmark} {gpu} {precision}",
        row_id=f"{told} {gpus} {system}",
        family=f"mlperf {told} {gpus}",
        gpu=gpu,
        num_gpus=gpus,
        cluster=_CLUSTERS.get(gpu, gpu),
        job=None if why_not else _job(cells, model or ""),
        measured_s=cells.number("step_time_s"),
        scored=not why_not,
        why_not=why_not,
        compared=scaling if benchmark == "gpt3" else None,
    )


def _job(cells: Cells, model: str) -> Job:
    tp, pp, vp = cells.count("tp"), cells.count("pp"), cells.count("vp", 1)
    shape = published_shape(model, cells.count("seq_len"))
    assert shape is not None, model
    even = shape.num_layers % (pp * vp) == 0
    return Job(
        shape=shape,
        layout=Layout(
            tp=tp,
            cp=cells.count("cp", 1),
            pp=pp,
            dp=cells.count("dp"),
            tp_overlap=tp > 1 and cells.text("tp_comm_overlap") == "yes",
            virtual_stages=vp,
            micro_batch=cells.count("micro_batch"),
            pipeline="interleaved" if vp > 1 else "1f1b",
            recompute=_RECOMPUTE.get(cells.text("recompute"), "none"),
            stage_layers=None if even else weighted_stages(shape.num_layers, pp * vp),
        ),
        seq_len=cells.count("seq_len"),
        global_batch=cells.count("global_batch"),
        recipe=megatron_recipe("sdpa_cudnn", _PRECISIONS[cells.text("precision")], "model"),
    )

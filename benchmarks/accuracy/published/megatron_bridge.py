"""NVIDIA-NeMo/Megatron-Bridge's performance pages: a configuration in a year of releases.

A row is a configuration; its time is that of the mean of its releases' speeds, which differ by a
factor of 1.06 (dense) and 1.18 (experts). What the pages leave open is taken, once: nothing is
recomputed, gradients are reduced in bf16, attention is cuDNN's, collectives of tp overlap products
in dense models (the recipes' user buffers), experts are spread over tp x dp (`etp` 1), stages
count embedding and loss as layers where they would be uneven, `fsdp` is ZeRO-3 over as many ranks.

DeepSeek-V3 predicts a token further on but where the note says "w/o MTP": so say the printed model
FLOPs, 260 GFLOP a token beside 249.6. That is priced as one layer more; its second pass through the
head, 2 % of the work, is not. Its experts on several nodes of 8 GPUs are sent a token once a node
(DeepEP), which was taken after errors had been seen: without it H100 and B200 are +30 and +130 %.
Stages of latent attention's models are filled from the front.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import Any, Literal

from pydantic import ValidationError

from benchmarks.accuracy.published.published_models import (
    filled_stages,
    published_shape,
    weighted_stages,
)
from twinstream.fidelity.cluster_rows import ClusterRow
from twinstream.hardware_profiles.csv_table import Cells
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import Layout
from twinstream.models.recipes.recipe import megatron_recipe

COLUMNS = (
    *("release", "mode", "model", "system", "precision", "gpus", "global_batch", "micro_batch"),
    *("seq_len", "fsdp", "tp", "pp", "cp", "vp", "ep", "tokens_per_s_per_gpu", "source"),
)
_CLUSTERS = {"H100": "h100_dgx", "B200": "b200_dgx", "B300": "b300_dgx", "GB200": "gb200_nvl72",
             "GB300": "gb300_nvl72"}  # fmt: skip
_MODELS = {"LLAMA3_8B": "llama3-8b", "LLAMA3_70B": "llama3-70b", "LLAMA3.1_405B": "llama3.1-405b",
           "Qwen3_30B_a3B": "qwen3-30b-a3b", "Qwen3_235B_a22B": "qwen3-235b-a22b",
           "GPT OSS 120B": "gpt-oss-120b", "DeepSeekV3": "deepseek-v3",
           "Kimi_K2": "kimi-k2"}  # fmt: skip
_GPUS_OF_A_NODE = 8  # of H100, B200 and B300
_PREDICTS_FURTHER = "DeepSeekV3"
_NOT_PRETRAINED = {
    "lora": "LoRA: how sequences are packed is not stated",
    "sft": "sft: how sequences are packed is not stated",
}


def row_of(cells: Cells) -> ClusterRow:
    """One line of the table: a configuration in one release."""
    name, gpu, mode = (cells.text(column) for column in ("model", "system", "mode"))
    gpus, seq_len = cells.count("gpus"), cells.count("seq_len")
    precision: Literal["bf16", "fp8", "fp4"] = "bf16"
    if cells.text("precision") != "BF16":
        precision = "fp4" if "FP4" in cells.text("precision") else "fp8"
    shape = published_shape(_MODELS.get(name, name), seq_len)
    why_not = _NOT_PRETRAINED.get(mode, "")
    if shape is not None and name == _PREDICTS_FURTHER and "w/o MTP" not in cells.text("note"):
        shape = shape.model_copy(update={"num_layers": shape.num_layers + 1})
    if shape is None and not why_not:
        why_not = f"{name} has parts that no shape here has"
    if "tokendrop" in cells.text("note") and not why_not:
        why_not = "experts drop tokens beyond their capacity, which is not stated"
    job = None
    if shape is not None and not why_not:
        try:
            job = _job(cells, shape, precision)
        except ValidationError as error:
            why_not = error.errors(include_url=False)[0]["msg"]
    kind = "experts" if shape is None or shape.experts is not None else "dense"
    names = {"tp": "tp", "pp": "pp", "cp": "cp", "vp": "vp", "ep": "ep", "micro_batch": "mb"}
    degrees = "".join(f" {short}{cells.text(column)}" for column, short in names.items()
                      if cells.text(column) not in ("", "1"))  # fmt: skip
    sharded = f" fsdp{cells.text('fsdp')}" if cells.text("fsdp") not in ("", "0") else ""
    named = f"{name} w/o MTP" if "w/o MTP" in cells.text("note") else name
    batch = cells.text("global_batch")
    told = f"{named} {mode} {precision} seq{seq_len}{degrees}{sharded} b{batch}"
    tokens = cells.count("global_batch") * seq_len
    return ClusterRow(
        series=f"Megatron-Bridge {gpu} {kind}",
        row_id=f"{told} {gpus}",
        family=f"Megatron-Bridge {gpu} {told} {gpus}",
        gpu=gpu,
        num_gpus=gpus,
        cluster=_CLUSTERS[gpu],
        job=job,
        measured_s=tokens / gpus / cells.number("tokens_per_s_per_gpu"),
        note=f"release {cells.text('release')}",
        scored=not why_not,
        why_not=why_not,
        recompute_stated=False,
    )


def one_a_configuration(rows: Sequence[ClusterRow]) -> tuple[ClusterRow, ...]:
    """Rows of one configuration as one, by the mean speed of its releases."""
    alike: dict[str, list[ClusterRow]] = {}
    for row in rows:
        alike.setdefault(f"{row.family} {row.why_not}", []).append(row)
    found = []
    for first, *others in alike.values():
        every = (first, *others)
        measured_s = 1 / fmean(1 / row.measured_s for row in every if row.measured_s)
        releases = ", ".join(sorted(row.note.removeprefix("release ") for row in every))
        changes: dict[str, Any] = {"measured_s": measured_s, "note": f"mean of {releases}"}
        found.append(first.model_copy(update=changes))
    return tuple(found)


def _nodes_of_experts(cells: Cells) -> int | None:
    """Nodes of 8 GPUs over which experts lie."""
    nodes = cells.count("ep", 1) // _GPUS_OF_A_NODE
    return nodes if nodes > 1 and "GB" not in cells.text("system") else None


def _job(cells: Cells, shape: ModelSpec, precision: Literal["bf16", "fp8", "fp4"]) -> Job:
    tp, pp, cp, vp = (cells.count(name, 1) for name in ("tp", "pp", "cp", "vp"))
    fsdp, dense = int(cells.text("fsdp") or "0"), shape.experts is None
    dp = cells.count("gpus") // (tp * pp * cp)
    stages = weighted_stages(shape.num_layers, pp * vp)
    if shape.latent is not None:
        stages = filled_stages(shape.num_layers, pp * vp)
    even = shape.num_layers % (pp * vp) == 0
    return Job(
        shape=shape,
        layout=Layout(
            tp=tp,
            cp=cp,
            pp=pp,
            dp=dp,
            ep=1 if dense else cells.count("ep", 1),
            etp=None if dense else 1,
            expert_nodes=None if shape.latent is None else _nodes_of_experts(cells),
            tp_overlap=dense and tp > 1,
            virtual_stages=vp,
            micro_batch=cells.count("micro_batch"),
            pipeline="interleaved" if vp > 1 else "1f1b",
            zero=3 if fsdp else 1,
            shard=min(fsdp, dp * cp) if fsdp else None,
            stage_layers=None if even else stages,
        ),
        seq_len=cells.count("seq_len"),
        global_batch=cells.count("global_batch"),
        recipe=megatron_recipe("sdpa_cudnn", precision, "model"),
    )

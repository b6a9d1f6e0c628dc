"""NVIDIA/dgxc-benchmarking's tables: NeMo on Megatron, MaxText and PaxML.

Read with the recipes in mind, where cells say nothing (from v25.04 on they lie in a container):
recomputation is that of the model's last stated recipe, collectives of tp overlap products as all
stated recipes with tp have them, gradients are reduced in bf16, optimizers are sharded, attention
is cuDNN's (Transformer Engine). Switches reduced nothing up to v25.03 (NVLS was off). Experts' load
was not forced to balance before v25.05: what the busiest rank gets is taken as 1.2 times the mean,
which was chosen on grok1's rows in bf16.
"""

from typing import Literal

from pydantic import ValidationError

from benchmarks.accuracy.published.published_models import (
    published_shape,
    weighted_stages,
)
from twinstream.fidelity.cluster_rows import ClusterRow
from twinstream.hardware_profiles.csv_table import Cells
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import Layout, Recompute
from twinstream.models.recipes.recipe import megatron_recipe

COLUMNS = (
    *("model", "framework", "architecture", "reduced_layers", "gpu_type", "num_gpus", "tp", "pp"),
    *("cp", "vp", "ep", "etp", "dp", "fsdp", "micro_batch", "global_batch", "seq_len", "n_layers"),
    *("precision", "mode", "recompute", "tp_comm_overlap", "step_time_s", "release_first", "note"),
)
_CLUSTERS = {"H100": "h100_dgx", "GB200": "gb200_nvl72"}
_GPT2_VOCAB = 50257
# XLA's policies run again what they do not keep: attention and the products into the FFN, half of a
# layer's FLOPs or more, and with save_qkv_proj the output projection, a tenth, besides.
_RECOMPUTE: dict[str, Recompute] = {
    "none": "none",
    "selective": "selective",
    "modules: core_attn": "selective",
    "save_dot_only": "none",
    "save_qkv_proj": "mlp",
    "save_qkv_out_proj": "mlp",
}
_UNBALANCED = 1.2
_STATED_BEFORE: dict[str, Recompute] = {"nemotron4-340b": "selective"}


def row_of(cells: Cells) -> ClusterRow:
    """One line of the table."""
    model, gpu, framework = (cells.text(name) for name in ("model", "gpu_type", "framework"))
    precision, release = cells.text("precision"), cells.text("release_first")
    note, gpus = cells.text("note"), cells.count("num_gpus")
    shape = published_shape(model, cells.count("seq_len"))
    why_not = _why_not(cells, shape)
    job = None
    if not why_not and shape is not None:
        try:
            job = _job(cells, shape)
        except ValidationError as error:
            why_not = error.errors(include_url=False)[0]["msg"]
    suspect = "suspect" in note
    mode = "" if cells.text("mode") == "pretrain" else f" {cells.text('mode')}"
    kind = "" if framework == "nemo" else f" {framework}"
    moe = "" if cells.text("architecture") == "dense" else f" {cells.text('architecture')}"
    told = f"{model}{kind}{mode} {precision} {release} {_degrees(cells)}"
    return ClusterRow(
        series=f"{'PaxML' if framework == 'paxml' else 'dgxc'} {gpu} {precision}{moe}{mode}",
        row_id=f"{told} {gpus}",
        family=f"dgxc {gpu} {told}",
        gpu=gpu,
        num_gpus=gpus,
        cluster=_CLUSTERS.get(gpu, gpu),
        job=job,
        measured_s=cells.number("step_time_s"),
        note=note,
        suspect=suspect,
        scored=not (suspect or why_not),
        why_not=why_not or (note if suspect else ""),
        framework="megatron" if framework == "nemo" else "xla",
        recompute_stated=framework == "nemo" and cells.text("recompute") in _RECOMPUTE,
    )


def _degrees(cells: Cells) -> str:
    names = {"tp": "tp", "pp": "pp", "cp": "cp", "vp": "vp", "ep": "ep", "micro_batch": "mb"}
    told = "".join(f" {short}{cells.text(name)}" for name, short in names.items()
                   if cells.text(name) not in ("", "1"))  # fmt: skip
    proxy = f" L{cells.text('n_layers')}" if cells.flag("reduced_layers") else ""
    return f"seq{cells.text('seq_len')}{proxy}{told}"


def _why_not(cells: Cells, shape: ModelSpec | None) -> str:
    model, mode, recompute = (cells.text(name) for name in ("model", "mode", "recompute"))
    if mode == "lora":
        return "LoRA: frozen weights have no gradients, which no layout here says"
    if mode != "pretrain":
        return f"{mode}: how sequences are packed is not stated"
    if shape is None:
        return f"{model} ({cells.text('architecture')}) has parts that no shape here has"
    if cells.text("gpu_type") not in _CLUSTERS:
        return f"no cluster profile of {cells.text('gpu_type')}"
    known = recompute in _RECOMPUTE or recompute in ("not stated", "") or _projections(recompute)
    if not known:
        return f"recomputation '{recompute}' is not known here"
    return ""


def _projections(recompute: str) -> bool:
    """Whether attention's projections are kept; MLP products besides are what leaves the FFN."""
    return recompute.startswith("custom: q, k, v and output projections kept")


def _job(cells: Cells, shape: ModelSpec) -> Job:
    model, release = cells.text("model"), cells.text("release_first")
    tp, pp, vp = cells.count("tp"), cells.count("pp"), cells.count("vp", 1)
    stated_recipe = release < "v25.04"
    shape = shape.model_copy(update={"num_layers": cells.count("n_layers", shape.num_layers)})
    if model == "llama3.1-405b" and stated_recipe:  # the recipe's heads, not the released model's
        shape = shape.model_copy(update={"num_kv_heads": 16})
        if release == "v24.11.1":
            shape = shape.model_copy(update={"vocab_size": _GPT2_VOCAB})
    zero: Literal[1, 3] = 1 if cells.text("framework") == "nemo" else 3
    even = shape.num_layers % (pp * vp) == 0
    return Job(
        shape=shape,
        layout=Layout(
            tp=tp,
            cp=cells.count("cp"),
            pp=pp,
            dp=cells.count("dp"),
            ep=cells.count("ep", 1),
            etp=cells.count("etp", tp) if shape.experts is not None else None,
            expert_imbalance=_UNBALANCED if shape.experts and release < "v25.05" else 1.0,
            tp_overlap=tp > 1 and zero == 1 and cells.text("tp_comm_overlap") != "no",
            virtual_stages=vp,
            micro_batch=cells.count("micro_batch"),
            pipeline="interleaved" if vp > 1 else "1f1b",
            zero=zero,
            shard=cells.count("fsdp", cells.count("dp")) if zero == 3 else None,
            recompute=_recompute(cells),
            stage_layers=None if even else weighted_stages(shape.num_layers, pp * vp),
        ),
        seq_len=cells.count("seq_len"),
        global_batch=cells.count("global_batch"),
        recipe=megatron_recipe(
            "sdpa_cudnn", "fp8" if cells.text("precision") == "fp8" else "bf16", "model"
        ),
        network_reduction=not stated_recipe,
    )


def _recompute(cells: Cells) -> Recompute:
    stated = cells.text("recompute")
    if _projections(stated):
        return "mlp"
    return _RECOMPUTE.get(stated, _STATED_BEFORE.get(cells.text("model"), "none"))

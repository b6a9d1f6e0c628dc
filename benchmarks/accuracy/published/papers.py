"""Tables of papers, and TorchTitan's benchmark pages.

Each paper leaves something open; what is taken is said here, once:

- Narayanan 2021 (Megatron), Korthikanti 2022: fp16, gradients reduced in 16 bits when all are there
  (Megatron-LM overlapped that from 2023 on), dropout, unfused attention, no ZeRO but where the
  table says so. Table 1's interleaving degree is not stated: the
  most of 1, 2 and 3 that divides a stage's layers, and none on two stages, where there is no such
  schedule. ZeRO-3 ran in DeepSpeed, whose use of the network is a cluster of its own.
- MegaScale: of the rows called Megatron-LM, nothing is recomputed and attention is fused (what is
  printed is 53 % of the peak, which recomputing whole layers could not reach), and gradients and
  parameters move when all are there (to overlap that is one of the paper's steps). MegaScale's own
  have parallel blocks and windows, which no shape here has.
- TorchTitan: attention is torch's FlashAttention-2, gradients reduced in float32; 'selective (op
  level)' runs every other matmul again, about as many FLOPs as the products into the FFN, which are
  taken; where a pipeline runs, parameters stay gathered (ZeRO-1) and there are as many microbatches
  as stages.
- Llama 3: TFLOP/s by a formula that is not stated, so that no time follows.
"""

from typing import Any, Literal

from benchmarks.accuracy.published.published_models import gpt_shape, published_shape
from twinstream.fidelity.cluster_rows import ClusterRow, Compared
from twinstream.hardware_profiles.csv_table import Cells
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import Layout, Recompute
from twinstream.models.recipes.recipe import megatron_recipe

COLUMNS = (
    *("paper", "table", "row", "model", "n_layers", "hidden", "heads", "seq_len", "vocab"),
    *("gpu_type", "num_gpus", "tp", "pp", "cp", "dp", "vp", "sharding", "micro_batch"),
    *("global_batch", "precision", "recompute", "options", "metric", "value"),
    *("step_time_s_derived", "note"),
)
# Most that the allocator reserved of a GPU, GiB: the same pages' column of peak memory.
_TITAN_PEAKS = {
    ("Table 1", "1"): 82.4, ("Table 1", "3"): 76.8, ("Table 2", "1"): 83.9, ("Table 2", "3"): 84.0,
    ("Table 3", "1"): 67.0, ("Table 3", "3"): 61.8, ("Table 4", "1"): 71.9, ("Table 5", "1"): 82.5,
    ("Table 6", "1"): 75.3, ("Table 6", "3"): 77.1,
}  # fmt: skip
_TITAN = {"H100_96GB_HBM2e_500W": "h100_titan", "H200": "h200_dgx"}


def row_of(cells: Cells) -> ClusterRow:
    """One line of the table."""
    paper = cells.text("paper")
    readers = {"Narayanan": _megatron, "Korthikanti": _megatron, "MegaScale": _megascale,
               "TorchTitan": _titan}  # fmt: skip
    for name, read in readers.items():
        if paper.startswith(name):
            return read(cells, name)
    known = "Llama Team" in paper
    why = "the FLOP formula behind its TFLOP/s is not stated" if known else "unknown paper"
    return _row(cells, "Llama 3" if known else paper, why_not=why)


def _row(cells: Cells, series: str, **fields: Any) -> ClusterRow:
    options = cells.text("options")
    name = f"{cells.text('model')} {cells.text('precision')} {options}".strip()
    place = f"{cells.text('table')} row {cells.text('row')}"
    derived = cells.text("step_time_s_derived")
    why_not = fields.get("why_not", "")
    told: dict[str, Any] = {
        "series": series,
        "row_id": f"{place}: {name}",
        "family": f"{cells.text('paper')} {place}",
        "gpu": cells.text("gpu_type").split("_")[0],
        "num_gpus": cells.count("num_gpus"),
        "cluster": "",
        "measured_s": cells.number("step_time_s_derived") if derived else None,
        "note": cells.text("note"),
        "scored": bool(derived) and not why_not,
        **fields,
    }
    return ClusterRow(**told)


def _degrees(cells: Cells) -> Layout:
    """A layout of the stated degrees, and nothing else that is stated."""
    return Layout(
        tp=cells.count("tp"), pp=cells.count("pp"), cp=cells.count("cp", 1), dp=cells.count("dp")
    )


def _megatron(cells: Cells, paper: str) -> ClusterRow:
    table, zero3 = cells.text("table"), cells.text("sharding") == "zero3"
    sizes = (cells.count("n_layers"), cells.count("hidden"), cells.count("heads"))
    seq_len, at = cells.count("seq_len"), _degrees(cells)
    stages = cells.count("vp", _interleaved(cells) if paper + table == "NarayananTable 1" else 1)
    layout = Layout(
        tp=at.tp,
        pp=at.pp,
        cp=at.cp,
        dp=at.dp,
        virtual_stages=stages,
        micro_batch=cells.count("micro_batch"),
        pipeline="interleaved" if stages > 1 else "1f1b",
        zero=3 if zero3 else 0,
        recompute=_recompute(cells),
        sequence_parallel="sequence parallel" in cells.text("options"),
        dp_overlap=zero3,
    )
    vocab = cells.count("vocab")
    job = Job(
        shape=gpt_shape(cells.text("model"), sizes, seq_len, vocab, dropout=True),
        layout=layout,
        seq_len=seq_len,
        global_batch=cells.count("global_batch"),
        recipe=megatron_recipe("unfused", "fp16", "model"),
        network_reduction=False,
    )
    pair = f"ZeRO-3 against PTD, {cells.text('model')} on {cells.text('num_gpus')}"
    compared = Compared(kind="zero3", set=pair, rank=int(zero3))
    series = f"Megatron {table}" if paper == "Narayanan" else f"Korthikanti {table}"
    if paper == "Narayanan" and table == "Table 2":
        series += " ZeRO-3" if zero3 else " PTD"
    return _row(cells, series, cluster="a100_deepspeed" if zero3 else "a100_dgx", job=job,
                compared=compared if "Table 2" in series else None,
                framework="deepspeed" if zero3 else "megatron")  # fmt: skip


def _interleaved(cells: Cells) -> int:
    pp, layers = cells.count("pp"), cells.count("n_layers")
    if pp <= 2 or layers % pp:
        return 1
    return max(stages for stages in (1, 2, 3) if (layers // pp) % stages == 0)


def _recompute(cells: Cells) -> Recompute:
    stated = cells.text("recompute")
    if stated.startswith("full"):
        return "full"
    if "op level" in stated:
        return "mlp"
    return "selective" if stated == "selective" else "none"


def _megascale(cells: Cells, paper: str) -> ClusterRow:
    if cells.text("options") != "Megatron-LM":
        return _row(cells, f"{paper} own", why_not="parallel blocks and sliding windows")
    sizes = (cells.count("n_layers"), cells.count("hidden"), cells.count("heads"))
    seq_len, stages, at = cells.count("seq_len"), cells.count("vp", 1), _degrees(cells)
    shape = gpt_shape("gpt-175b", sizes, seq_len, cells.count("vocab"))
    layout = Layout(
        tp=at.tp,
        pp=at.pp,
        cp=at.cp,
        dp=at.dp,
        virtual_stages=stages,
        micro_batch=cells.count("micro_batch", 1),
        pipeline="interleaved" if stages > 1 else "1f1b",
        dp_overlap=False,
    )
    job = Job(
        shape=shape,
        layout=layout,
        seq_len=seq_len,
        global_batch=cells.count("global_batch"),
        recipe=megatron_recipe("flash2"),
        network_reduction=False,
    )
    batch = f"MegaScale, Megatron-LM, batch {cells.text('global_batch')}"
    scaling = Compared(kind="scaling", set=batch, rank=cells.count("num_gpus"))
    return _row(cells, f"{paper} Megatron-LM", cluster="a100_roce", job=job, compared=scaling)


def _titan(cells: Cells, paper: str) -> ClusterRow:
    gpu, precision = cells.text("gpu_type"), cells.text("precision")
    series = f"{paper} {gpu.split('_')[0]} {'bf16' if precision == 'bf16' else 'float8'}"
    if precision == "float8_rowwise":
        return _row(cells, series, why_not="float8 with a scale a row: another matmul")
    shape = published_shape(cells.text("model"), cells.count("seq_len"))
    if shape is None or gpu not in _TITAN:
        return _row(cells, series, why_not=f"{cells.text('model')} on {gpu} is not known here")
    options, at = cells.text("options"), _degrees(cells)
    batch = cells.count("global_batch")
    stages = 2 if "Interleaved" in options else 1
    zero: Literal[1, 3] = 3 if at.pp == 1 else 1
    job = Job(
        shape=shape,
        layout=Layout(
            tp=at.tp,
            pp=at.pp,
            cp=at.cp,
            dp=at.dp,
            virtual_stages=stages,
            micro_batch=cells.count("micro_batch", max(1, batch // at.dp // at.pp)),
            pipeline="interleaved" if stages > 1 else "1f1b",
            zero=zero,
            tp_overlap="async" in options.lower(),
            recompute=_recompute(cells),
        ),
        seq_len=cells.count("seq_len"),
        global_batch=batch,
        recipe=megatron_recipe("sdpa_flash", "bf16" if precision == "bf16" else "fp8"),
    )
    peak = _TITAN_PEAKS.get((cells.text("table").removesuffix(" (2024-12)"), cells.text("row")))
    return _row(cells, series, cluster=_TITAN[gpu], job=job, compared=_titan_sets(cells),
                framework="torch_fsdp",
                reserved_bytes=None if peak is None else round(peak * 2**30))  # fmt: skip


def _titan_sets(cells: Cells) -> Compared:
    """FSDP from fewest GPUs, TP with and without overlap, pipelines by order, CP by ranks."""
    options, table = cells.text("options"), cells.text("table")
    what = f"{cells.text('model')} {cells.text('precision')}"
    at, gpus = _degrees(cells), cells.count("num_gpus")
    if "CP" in options:
        told = f"CP, {what} on {gpus}"
        return Compared(kind="ratio", set=told, rank=at.cp)
    if at.pp > 1:
        interleaved = int("Interleaved" in options)
        return Compared(kind="ratio", set=f"pipeline, {what} on {gpus}", rank=interleaved)
    if at.tp > 1:
        overlaps = int("async" in options.lower())
        return Compared(kind="ratio", set=f"TP, {table}, {what} on {gpus}", rank=overlaps)
    told = f"FSDP, {cells.text('gpu_type')} {what} {options}"
    return Compared(kind="ratio", set=told, rank=gpus)

"""vTrain's measured table (`ground_truth_multi.csv`): Megatron-DeepSpeed on up to 512 A100.

Not stated there, and taken from what Megatron-DeepSpeed did by default in 2023: fp16, gradients
reduced in 16 bits when all are there, no sequence parallelism, unfused attention, no ZeRO, dropout.
"""

from benchmarks.accuracy.published.published_models import gpt_shape
from twinstream.fidelity.cluster_rows import ClusterRow
from twinstream.hardware_profiles.csv_table import Cells
from twinstream.models.parallel.job import Job
from twinstream.models.parallel.layout import Layout
from twinstream.models.recipe import megatron_recipe

COLUMNS = (
    *("layers", "hidden", "heads", "seq", "vocab_padded", "micro_batch", "global_batch", "tp"),
    *("dp", "pp", "gpus", "activation_checkpointing", "config_file", "measured_ms"),
)


def row_of(cells: Cells) -> ClusterRow:
    """One line of the table."""
    sizes = (cells.count("layers"), cells.count("hidden"), cells.count("heads"))
    seq_len, tp, pp = cells.count("seq"), cells.count("tp"), cells.count("pp")
    name = cells.text("config_file").removeprefix("config_val_").removesuffix(".json")
    model = name.split("_")[0]
    job = Job(
        shape=gpt_shape(f"gpt-{model}", sizes, seq_len, cells.count("vocab_padded"), dropout=True),
        layout=Layout(
            tp=tp,
            pp=pp,
            dp=cells.count("dp"),
            micro_batch=cells.count("micro_batch"),
            zero=0,
            recompute="full" if cells.text("activation_checkpointing") == "full" else "none",
            sequence_parallel=False,
            dp_overlap=False,
        ),
        seq_len=seq_len,
        global_batch=cells.count("global_batch"),
        recipe=megatron_recipe("unfused", "fp16", "model"),
        network_reduction=False,
    )
    return ClusterRow(
        series="vTrain multi",
        row_id=name,
        family=f"vtrain {model} tp{tp} dp{job.layout.dp} pp{pp}",
        gpu="A100",
        num_gpus=cells.count("gpus"),
        cluster="a100_vtrain",
        job=job,
        measured_s=cells.number("measured_ms") / 1e3,
    )

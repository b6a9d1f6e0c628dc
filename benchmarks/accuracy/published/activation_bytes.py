"""Bytes of activations by the published formula of Megatron.

Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, arXiv:2205.05198,
section 4 (equations 1 to 6), for a transformer in 16 bits with dropout masks of one byte.
"""

from twinstream.models.layouts.job import Job

ACTIVATION_SERIES = ("Korthikanti Table 5",)


def published_activation_bytes(job: Job) -> int:
    """Activations of the layers on the first pipeline stage, in flight under 1F1B.

    Of a microbatch's layer: s b h (10 + 24 / t + 5 a s / (h t)); with sequence parallelism the 10
    is split too; without the attention core's part where that is run again; 2 s b h where the whole
    layer is. On the first stage of p, as many microbatches as stages are in flight: L layers, and
    (p - 1) / (p v) more with v interleaved stages.
    """
    shape, layout = job.shape, job.layout
    tokens = job.seq_len * layout.micro_batch // layout.cp
    unit = tokens * shape.d_model
    core = 5 * shape.num_heads * job.seq_len / shape.d_model / layout.tp
    split = 34 / layout.tp if layout.sequence_parallel else 10 + 24 / layout.tp
    match layout.recompute:
        case "none":
            a_layer = unit * (split + core)
        case "selective":
            a_layer = unit * split
        case _:
            a_layer = unit * 2 / (layout.tp if layout.sequence_parallel else 1)
    rounds = job.global_batch // (layout.dp * layout.micro_batch)
    in_flight = min(layout.pp, rounds) / layout.pp
    more = 1 + (layout.pp - 1) / (layout.pp * layout.virtual_stages)
    interleaved = more if layout.virtual_stages > 1 else 1
    return round(a_layer * shape.num_layers * in_flight * interleaved)

"""An estimate as one flat JSON document."""

from twinstream.cost.time.run import TimeCost


def time_document(cost: TimeCost) -> dict[str, object]:
    """All figures in full, those of davidsj/ml_par_sim under its names, too."""
    batch, setting = cost.batch, cost.setting
    layout = setting.layout
    return {
        **_seed_names(cost),
        "num_params": cost.num_params,
        "num_params_per_token": cost.num_params_per_token,
        "num_tokens": cost.num_tokens,
        "num_batches": cost.num_batches,
        "num_chips": cost.num_chips,
        "flop_total": cost.flop_total,
        "flop_per_batch": batch.flop_per_batch,
        "pipeline": [layout.pp, layout.interleaving, batch.layers_per_run, batch.bubble_layers],
        "matmul_shape": list(batch.matmul_shape),
        "matmul_s": batch.matmul_s,
        "matmul_limit": batch.matmul_limit,
        "pipeline_bubble_s": batch.bubble_s,
        "pipeline_full_flop_s": batch.steady_compute_s,
        "pipeline_full_net_s": batch.steady_network_s,
        "pipeline_full_s": batch.steady_s,
        "grad_reduction_s": batch.gradient_s,
        "batch_s": batch.batch_s,
        "utilization": batch.utilization,
        "exchanges": [one.model_dump() for one in batch.exchanges],
        **cost.bill.model_dump(),
        "asked": setting.model_dump(),
    }


def _seed_names(cost: TimeCost) -> dict[str, object]:
    """What simple_transformer.py holds, by its own names."""
    batch, layout = cost.batch, cost.setting.layout
    inner, outer, tokens = batch.matmul_shape
    return {
        "N": cost.num_params_per_token,
        "P": cost.num_params,
        "D": cost.num_tokens,
        "p": cost.num_chips,
        "n_batches": cost.num_batches,
        "n_microbatches_per_batch": batch.num_microbatches,
        "n_pipeline_steps": layout.pp * layout.interleaving,
        "pipe_boundary_intvl": batch.layers_per_run,
        "pipeline_bubble_layers": batch.bubble_layers,
        "tokens_per_matmul": tokens,
        "d_int_per_matmul": inner,
        "d_per_matmul": outer,
        "matmul_time": batch.matmul_s,
        "pipeline_bubble_time": batch.bubble_s,
        "pipeline_full_flop_time": batch.steady_compute_s,
        "pipeline_full_net_time": batch.steady_network_s,
        "pipeline_full_time": batch.steady_s,
        "gradient_reduction_time": batch.gradient_s,
        "batch_time": batch.batch_s,
        "util": batch.utilization,
        "total_flop": cost.flop_total,
        "flop_per_expert": cost.flop_total / cost.setting.stack.num_experts,
    }

"""A count as one flat JSON document."""

from twinstream.cost.bill import Bill
from twinstream.cost.work.run import WorkCost


def work_document(cost: WorkCost) -> dict[str, object]:
    """All figures in full, those of davidsj/ml_par_sim under its names, too."""
    traffic, bill = cost.traffic, cost.bill
    money = dict.fromkeys(Bill.model_fields) if bill is None else bill.model_dump()
    return {
        **_seed_names(cost),
        "num_params": cost.decoder.num_params,
        "num_params_per_token": cost.decoder.num_params_per_token,
        "num_tokens": cost.batches.num_tokens,
        "num_batches": cost.batches.num_batches,
        "num_devices": cost.mesh.num_devices,
        "flop_fwd": cost.flop_fwd,
        "flop_bwd": cost.flop_bwd,
        "flop_total": cost.flop_total,
        **traffic.model_dump(),
        "sent_bytes_total": traffic.sent_bytes_fwd + traffic.sent_bytes_bwd,
        "received_bytes_total": traffic.received_bytes_fwd + traffic.received_bytes_bwd,
        "axes": [one.model_dump() for one in cost.axes],
        "limits": [one.model_dump() | {"holds": one.holds} for one in cost.efficiency.limits],
        "rates": None if cost.rates is None else cost.rates.model_dump(),
        **money,
        "asked": {
            "model": cost.decoder.model_dump(),
            "batches": cost.batches.model_dump(),
            "mesh": cost.mesh.model_dump(),
            "counting": cost.counting.model_dump(),
        },
    }


def _seed_names(cost: WorkCost) -> dict[str, object]:
    """What transformer.py prints and holds, by its own names; None for what it leaves out.

    Its Tx and Rx count values, not bytes, and net is both together. Its totals are of both passes
    even where only the forward is timed.
    """
    sizes = cost.efficiency.micro_batch_sizes
    return {
        "N": cost.decoder.num_params,
        "N_effective": cost.decoder.num_params_per_token,
        "D": cost.batches.num_tokens,
        "P": cost.mesh.num_devices,
        "p": cost.mesh.num_devices,
        "params": cost.decoder.num_params,
        "n_batches": cost.batches.num_batches,
        "allowed_microbatch_sizes": list(sizes) if cost.counting.checks else None,
        **_seed_counts(cost),
        **_seed_rates(cost),
    }


def _seed_counts(cost: WorkCost) -> dict[str, object]:
    traffic, per_value = cost.traffic, cost.counting.bytes_per_value
    sent = (traffic.sent_bytes_fwd / per_value, traffic.sent_bytes_bwd / per_value)
    received = (traffic.received_bytes_fwd / per_value, traffic.received_bytes_bwd / per_value)
    columns = {
        "FLOP": (cost.flop_fwd, cost.flop_bwd),
        "Tx": sent,
        "Rx": received,
        "net": (sent[0] + received[0], sent[1] + received[1]),
    }
    passes = {"fwd": lambda one: one[0], "bwd": lambda one: one[1], "total": sum}
    return {
        f"{name}_{which}": figure(column)
        for name, column in columns.items()
        for which, figure in passes.items()
    }


def _seed_rates(cost: WorkCost) -> dict[str, object]:
    rates = cost.rates
    if rates is None:
        names = ("cluster_flop_per_sec", "cluster_bytes_per_sec", "total_flop_per_sec")
        return dict.fromkeys((*names, "total_bytes_per_sec", "runtime_sec"))
    sent, received = rates.sent_bytes_per_s, rates.received_bytes_per_s
    all_sent, all_received = rates.total_sent_bytes_per_s, rates.total_received_bytes_per_s
    return {
        "cluster_flop_per_sec": rates.flop_per_s,
        "cluster_bytes_per_sec": [sent + received, sent, received],
        "total_flop_per_sec": rates.total_flop_per_s,
        "total_bytes_per_sec": [all_sent + all_received, all_sent, all_received],
        "runtime_sec": rates.run_s,
    }

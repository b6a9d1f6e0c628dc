"""The figures of `cost work` and `cost time` as tables of a terminal."""

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Group, RenderableType

from twinstream.cost.bill import Bill
from twinstream.cost.time.batch import BatchTime
from twinstream.cost.time.chips import Chip, rate_of
from twinstream.cost.time.run import TimeCost
from twinstream.cost.work.mesh import Axis
from twinstream.cost.work.run import Rates, WorkCost
from twinstream.screens.fitted_table import FittedTable

_Row = Sequence[str]
_PASS_OF = {
    "layer": "a layer of a micro-batch",
    "boundary": "the end of a run of layers",
    "hop": "a layer, to other experts",
    "batch": "a batch, once",
}


def work_screen(cost: WorkCost) -> Group:
    """Model and run, the counts of the run, bytes by axis, rules of thumb, rates, the bill."""
    parts: list[RenderableType] = [
        _facts(_work_facts(cost)),
        "\nThe whole run, all devices together",
        _table(("", "forward", "backward", "both"), _count_rows(cost)),
        "\nBytes of them by axis of the mesh",
        _table(("axis", "devices", "sent, forward", "backward", "received, forward", "backward"),
               _axis_rows(cost)),
        "\nRules of thumb",
        _table(("", "is", "limit", ""), _limit_rows(cost)),
    ]  # fmt: skip
    if cost.rates is not None and cost.bill is not None:
        what = "the forward alone" if cost.counting.forward_only else "both passes"
        parts += [
            f"\nRates of {what}",
            _table(("", "a device", "all devices"), _rate_rows(cost.rates)),
            "",
            _facts(_bill_facts(cost.bill)),
        ]
    else:
        parts.append("\nRates, days and money need --cluster-flop-rate.")
    return Group(*parts)


def _work_facts(cost: WorkCost) -> dict[str, str]:
    decoder, batches, mesh = cost.decoder, cost.batches, cost.mesh
    tokens = (
        f"{_figure(batches.num_tokens)}, {batches.num_batches:,} batches of "
        f"{batches.batch_size:,} sequences of {batches.seq_len:,}"
    )
    if not cost.counting.checks:
        sizes = "not asked for (--skip-efficiency-check)"
    else:
        sizes = f"{_listed(cost.efficiency.micro_batch_sizes)} (sequences, over all replicas)"
    return {
        "parameters": f"{_figure(decoder.num_params)}, "
        f"{_figure(decoder.num_params_per_token)} of them for a token",
        "tokens": tokens,
        "micro-batch": sizes,
        "devices": f"{mesh.num_devices:,} = "
        + " x ".join(f"{mesh.degree(axis):,} {axis.value}" for axis in Axis),
    }


def _count_rows(cost: WorkCost) -> Iterable[_Row]:
    traffic, per_value = cost.traffic, cost.counting.bytes_per_value
    sent = (traffic.sent_bytes_fwd, traffic.sent_bytes_bwd)
    received = (traffic.received_bytes_fwd, traffic.received_bytes_bwd)
    both = (sent[0] + received[0], sent[1] + received[1])
    yield _passes("FLOP", cost.flop_fwd, cost.flop_bwd)
    for name, (forward, backward) in (
        ("sent", sent), ("received", received), ("sent and received", both),
    ):  # fmt: skip
        yield _passes(f"values {name}", forward / per_value, backward / per_value)
    yield _passes("bytes sent", *sent)
    yield _passes("bytes received", *received)
    yield _passes("bytes sent and received", *both)


def _passes(name: str, forward: float, backward: float) -> _Row:
    return name, _figure(forward), _figure(backward), _figure(forward + backward)


def _axis_rows(cost: WorkCost) -> Iterable[_Row]:
    for one in cost.axes:
        moved = (one.sent_bytes_fwd, one.sent_bytes_bwd, one.received_bytes_fwd,
                 one.received_bytes_bwd)  # fmt: skip
        yield one.axis.value, f"{one.degree:,}", *(_figure(count) for count in moved)


def _limit_rows(cost: WorkCost) -> Iterable[_Row]:
    for one in cost.efficiency.limits:
        verdict = "" if one.holds else "does not hold"
        yield f"{one.kind}: {one.of}", f"{one.value:,}", f"{one.relation} {one.bound:,}", verdict


def _rate_rows(rates: Rates) -> Iterable[_Row]:
    sent, received = rates.sent_bytes_per_s, rates.received_bytes_per_s
    all_sent, all_received = rates.total_sent_bytes_per_s, rates.total_received_bytes_per_s
    yield "FLOP/s", _figure(rates.flop_per_s), _figure(rates.total_flop_per_s)
    yield "bytes sent/s", _figure(sent), _figure(all_sent)
    yield "bytes received/s", _figure(received), _figure(all_received)
    yield "both/s", _figure(sent + received), _figure(all_sent + all_received)


def time_screen(cost: TimeCost) -> Group:
    """Model, run and chips, what is exchanged, the times of a batch, the bill."""
    batch = cost.batch
    return Group(
        _facts(_time_facts(cost)),
        "\nWhat a chip exchanges; it sends and receives so many bytes each pass",
        _table(("axis", "when", "bytes", "time"), _exchange_rows(batch)),
        "\nA batch",
        _table(("", "seconds"), _batch_rows(batch)),
        "",
        _facts({"utilization": f"{batch.utilization:.4f} of the peak of all chips"}
               | _bill_facts(cost.bill)),
    )  # fmt: skip


def _time_facts(cost: TimeCost) -> dict[str, str]:
    setting, batch = cost.setting, cost.batch
    stack, cut, layout = setting.stack, setting.cut, setting.layout
    inner, outer, tokens = batch.matmul_shape
    experts = f"{stack.num_routed:,} of {stack.num_experts:,} experts"
    return {
        "model": f"{stack.num_layers:,} x ({stack.d_model:,} x {stack.d_internal:,}), {experts}",
        "parameters": f"{_figure(cost.num_params)}, {_figure(cost.num_params_per_token)} of them "
        "for a token",
        "tokens": f"{_figure(cost.num_tokens)}, {cost.num_batches:,} batches of "
        f"{cut.batch_size:,} sequences of {cut.seq_len:,}",
        "FLOP": f"{_figure(cost.flop_total)}, {_figure(cost.flop_total / stack.num_experts)} an "
        f"expert, {_figure(batch.flop_per_batch)} a batch",
        "chips": f"{cost.num_chips:,} {setting.chip.name} = {layout.pp:,} pp x {layout.dp:,} dp x "
        f"{stack.num_experts:,} experts x {layout.tp:,} tp x {layout.tp2:,} tp2",
        "a chip": f"{_chip_line(setting.chip)}, {setting.base_utilization:.0%} of it in a matmul",
        "pipeline": f"{_counted(layout.pp, 'stage')} x {_counted(layout.interleaving, 'run')} of "
        f"{_counted(batch.layers_per_run, 'layer')}, bubble of "
        f"{_counted(batch.bubble_layers, 'layer')}, "
        f"{_counted(batch.num_microbatches, 'micro-batch', 'es')} of "
        f"{_counted(cut.microbatch_size, 'sequence')}",
        "a matmul": f"{inner:,} inner x {outer:,} outer x {tokens:,} tokens in "
        f"{setting.precision_bits} bits: {_figure(batch.matmul_s)} s, by {batch.matmul_limit}; "
        "2 a layer",
    }


def _chip_line(chip: Chip) -> str:
    compute, memory, network = (
        rate_of(chip, field)
        for field in ("flop_per_s_8bit", "memory_bytes_per_s", "network_bytes_per_s")
    )
    return (
        f"{compute / 1e12:,.1f} TFLOP/s in 8 bits, memory {memory / 1e9:,.0f} GB/s, network "
        f"{network / 1e9:,.1f} GB/s"
    )


def _exchange_rows(batch: BatchTime) -> Iterable[_Row]:
    for one in batch.exchanges:
        yield one.axis, _PASS_OF[one.when], _figure(one.sent_bytes), f"{_figure(one.seconds)} s"


def _batch_rows(batch: BatchTime) -> Iterable[_Row]:
    yield "pipeline bubble", f"{batch.bubble_s:,.4f}"
    yield "full pipeline", f"{batch.steady_s:,.4f}"
    yield "  of it computing", f"{batch.steady_compute_s:,.4f}"
    yield "  of it exchanging", f"{batch.steady_network_s:,.4f}"
    yield "sum of gradients", f"{batch.gradient_s:,.4f}"
    yield "the batch", f"{batch.batch_s:,.4f}"


def _bill_facts(bill: Bill) -> dict[str, str]:
    shown = {"training": _duration(bill.run_days)}
    if bill.goodput is not None:
        shown["goodput"] = f"{bill.goodput:.2%}"
        shown["wall time"] = _duration(bill.wall_days)
    shown["GPU-hours"] = f"{bill.gpu_hours:,.1f} of {_counted(bill.num_gpus, 'GPU')}"
    if bill.money is not None:
        shown["money"] = f"{bill.money:,.2f} at {bill.price_per_gpu_hour:,.2f} a GPU-hour"
    return shown


def _duration(days: float) -> str:
    """
    >>> _duration(118.83), _duration(0.1), _duration(1e-4)
    ('118.8 days', '2.4 hours', '8.6 seconds')
    """
    for unit, of_a_day in (("days", 1), ("hours", 24), ("minutes", 1440)):
        if days * of_a_day >= 1:
            return f"{days * of_a_day:,.1f} {unit}"
    return f"{days * 86400:.1f} seconds"


def _figure(number: float) -> str:
    """
    >>> _figure(2.2668e12), _figure(12), _figure(0)
    ('2.267e+12', '12', '0')
    """
    small = float(number).is_integer() and abs(number) < 1e4
    return f"{int(number):,}" if small else f"{number:.3e}"


def _counted(number: int, thing: str, plural: str = "s") -> str:
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}{plural}"


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(f"{size:,}" for size in sizes)


def _facts(facts: dict[str, str]) -> FittedTable:
    table = FittedTable(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, fact in facts.items():
        table.add_row(name, fact)
    return table


def _table(columns: Sequence[str], rows: Iterable[_Row]) -> FittedTable:
    table = FittedTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table

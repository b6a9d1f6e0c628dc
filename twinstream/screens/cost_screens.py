"""The documents of `cost work` and `cost time` as tables of a terminal."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType

from twinstream.screens.fitted_table import FittedTable

_Row = Sequence[str]
_PASSES = ("fwd", "bwd", "total")
_WHEN = {
    "layer": "a layer of a micro-batch",
    "boundary": "the end of a run of layers",
    "hop": "a layer, to other experts",
    "batch": "a batch, once",
}


def work_screen(found: Mapping[str, Any]) -> Group:
    """Model and run, the counts of the run, bytes by axis, rules of thumb, rates, the bill."""
    asked, axes, rates = found["asked"], found["axes"], found["rates"]
    sizes, model = found["allowed_microbatch_sizes"], found["model"]
    per_value = asked["counting"]["bytes_per_value"]
    facts = {
        "parameters": f"{_figure(found['num_params'])}, "
        f"{_figure(found['num_params_per_token'])} of them for a token",
        "tokens": _tokens(found, asked["batches"]),
        "micro-batch": "not asked for (--skip-efficiency-check)"
        if sizes is None
        else f"{', '.join(f'{one:,}' for one in sizes)} (sequences, over all replicas)",
        "devices": f"{found['num_devices']:,} = "
        + " x ".join(f"{one['degree']:,} {one['axis']}" for one in axes),
    }
    if model is not None:
        facts["model"] = (
            f"{model['name']}: {_figure(model['num_params'])} parameters with embedding, head and "
            f"norms; {_figure(model['flop_total'])} FLOP with the head, causal attention and no "
            "recompute"
        )
    counts = {"FLOP": [found[f"flop_{which}"] for which in _PASSES]}
    for unit, scale in (("values", 1), ("bytes", per_value)):
        for name, key in (("sent", "Tx"), ("received", "Rx"), ("sent and received", "net")):
            counts[f"{unit} {name}"] = [scale * found[f"{key}_{which}"] for which in _PASSES]
    moved = [f"{way}_bytes_{which}" for way in ("sent", "received") for which in ("fwd", "bwd")]
    parts: list[RenderableType] = [
        _facts(facts),
        "\nThe whole run, all devices together",
        _table(("", "forward", "backward", "both"), _figures(counts)),
        "\nBytes of them by axis of the mesh",
        _table(
            ("axis", "devices", "sent, forward", "backward", "received, forward", "backward"),
            ((one["axis"], f"{one['degree']:,}", *(_figure(one[key]) for key in moved))
             for one in axes),
        ),
        "\nRules of thumb",
        _table(
            ("", "is", "limit", ""),
            ((f"{one['kind']}: {one['of']}", f"{one['value']:,}",
              f"{one['relation']} {one['bound']:,}", "" if one["holds"] else "does not hold")
             for one in found["limits"]),
        ),
    ]  # fmt: skip
    if rates is None:
        return Group(*parts, "\nRates, days and money need --cluster-flop-rate.")
    each, everyone = found["cluster_bytes_per_sec"], found["total_bytes_per_sec"]
    of_both = {
        "FLOP/s": (found["cluster_flop_per_sec"], found["total_flop_per_sec"]),
        "bytes sent/s": (each[1], everyone[1]),
        "bytes received/s": (each[2], everyone[2]),
        "both/s": (each[0], everyone[0]),
    }
    what = "the forward alone" if asked["counting"]["forward_only"] else "both passes"
    table = _table(("", "a device", "all devices"), _figures(of_both))
    return Group(*parts, f"\nRates of {what}", table, "", _facts(_bill(found)))


def time_screen(found: Mapping[str, Any]) -> Group:
    """Model, run and chips, what is exchanged, the times of a batch, the bill."""
    asked = found["asked"]
    stack, cut, layout, chip = (asked[name] for name in ("stack", "cut", "layout", "chip"))
    pp, interleaving, layers_per_run, bubble_layers = found["pipeline"]
    inner, outer, tokens = found["matmul_shape"]
    compute, memory, network = (
        chip[f"{name}"]["value"]
        for name in ("flop_per_s_8bit", "memory_bytes_per_s", "network_bytes_per_s")
    )
    d_internal = round(stack["d_internal_ratio"] * stack["d_model"])
    experts = f"{stack['num_routed']:,} of {stack['num_experts']:,} experts"
    facts = {
        "model": f"{stack['num_layers']:,} x ({stack['d_model']:,} x {d_internal:,}), "
        + (stack["model"] or experts),
        "parameters": f"{_figure(found['num_params'])}, "
        f"{_figure(found['num_params_per_token'])} of them for a token",
        "tokens": _tokens(found, cut),
        "FLOP": f"{_figure(found['flop_total'])}, {_figure(found['flop_per_expert'])} an expert, "
        f"{_figure(found['flop_per_batch'])} a batch",
        "chips": f"{found['num_chips']:,} {chip['name']} = {pp:,} pp x {layout['dp']:,} dp x "
        f"{stack['num_experts']:,} experts x {layout['tp']:,} tp x {layout['tp2']:,} tp2",
        "a chip": f"{compute / 1e12:,.1f} TFLOP/s in 8 bits, memory {memory / 1e9:,.0f} GB/s, "
        f"network {network / 1e9:,.1f} GB/s, {asked['base_utilization']:.0%} of it in a matmul",
        "pipeline": f"{_counted(pp, 'stage')} x {_counted(interleaving, 'run')} of "
        f"{_counted(layers_per_run, 'layer')}, bubble of {_counted(bubble_layers, 'layer')}, "
        f"{_counted(found['n_microbatches_per_batch'], 'micro-batch', 'es')} of "
        f"{_counted(cut['microbatch_size'], 'sequence')}",
        "a matmul": f"{inner:,} inner x {outer:,} outer x {tokens:,} tokens in "
        f"{asked['precision_bits']} bits: {_figure(found['matmul_s'])} s, by "
        f"{found['matmul_limit']}; 2 a layer",
    }
    times = {
        "pipeline bubble": found["pipeline_bubble_s"],
        "full pipeline": found["pipeline_full_s"],
        "  of it computing": found["pipeline_full_flop_s"],
        "  of it exchanging": found["pipeline_full_net_s"],
        "sum of gradients": found["grad_reduction_s"],
        "the batch": found["batch_s"],
    }
    parts: list[RenderableType] = [
        _facts(facts),
        "\nWhat a chip exchanges; it sends and receives so many bytes each pass",
        _table(
            ("axis", "when", "bytes", "time"),
            ((one["axis"], _WHEN[one["when"]], _figure(one["sent_bytes"]),
              f"{_figure(one['seconds'])} s") for one in found["exchanges"]),
        ),
        "\nA batch",
        _table(("", "seconds"), ((name, f"{time_s:,.4f}") for name, time_s in times.items())),
        "",
        _facts({"utilization": f"{found['utilization']:.4f} of the peak of all chips"}
               | _bill(found)),
    ]  # fmt: skip
    if (shortage := _shortage(found)) is not None:
        parts.append(f"\n{shortage}")
    if asked["precision_bits"] == 8:
        parts.append("\nMost train in 16 bits, at half of this peak: --precision-bits 16.")
    return Group(*parts)


def devices_screen(found: Mapping[str, Any]) -> Group:
    """The run, and degrees, utilisation and days by number of devices."""
    facts = {
        "model": f"{_figure(found['params'])} parameters in {found['blocks']:,.0f} blocks of "
        f"{found['width']:,.0f}",
        "tokens": f"{_figure(found['tokens'])}, batches of {_figure(found['batch_tokens'])}",
    }
    names = ("devices", "pp", "dp", "tp_residual", "tp_hidden", "microbatches")
    rows = (
        (*(f"{row[name]:,}" for name in names), f"{row['utilization']:.2%}", f"{row['days']:,.4g}")
        for row in found["rows"]
    )
    columns = ("devices", "pp", "dp", "tp", "tp inner", "micro-batches", "utilization", "days")
    best = found["fastest"]
    told = (
        f"\nThe soonest end is after {best['days']:,.4g} days, on {best['devices']:,} devices at "
        f"{best['utilization']:.4%}."
    )
    return Group(_facts(facts), "", _table(columns, rows), told)


def _shortage(found: Mapping[str, Any]) -> str | None:
    """That the weights alone exceed a chip's memory; what else a step keeps is not counted here."""
    asked = found["asked"]
    layout, chip = asked["layout"], asked["chip"]
    if chip["memory_size_bytes"] is None:
        return None
    room_bytes = chip["memory_size_bytes"]["value"]
    parts = found["num_chips"] // layout["dp"]
    weights_bytes = found["num_params"] * asked["precision_bits"] / 8 / parts
    if weights_bytes <= room_bytes:
        return None
    return (
        f"This does not fit: the weights alone take {weights_bytes / 1e9:,.0f} GB of each chip, "
        f"which has {room_bytes / 1e9:,.0f} GB. Raise --pp or --tp; twinstream plan --cluster "
        "knows all of the memory, and what host memory takes."
    )


def _tokens(found: Mapping[str, Any], run: Mapping[str, Any]) -> str:
    return (
        f"{_figure(found['num_tokens'])}, {found['num_batches']:,} batches of "
        f"{run['batch_size']:,} sequences of {run['seq_len']:,}"
    )


def _bill(found: Mapping[str, Any]) -> dict[str, str]:
    shown = {"training": _duration(found["run_days"])}
    if found["goodput"] is not None:
        shown["goodput"] = f"{found['goodput']:.2%}"
        shown["wall time"] = _duration(found["wall_days"])
    shown["GPU-hours"] = f"{found['gpu_hours']:,.1f} of {_counted(found['num_gpus'], 'GPU')}"
    if found["money"] is not None:
        price = f"{found['price_per_gpu_hour']:,.2f} a GPU-hour"
        shown["money"] = f"{found['money']:,.2f} at {price}"
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


def _figures(rows: Mapping[str, Iterable[float]]) -> Iterable[_Row]:
    return ((name, *map(_figure, numbers)) for name, numbers in rows.items())


def _counted(number: int, thing: str, plural: str = "s") -> str:
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}{plural}"


def _facts(facts: Mapping[str, str]) -> FittedTable:
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

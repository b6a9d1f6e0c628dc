"""`cost`: what a training run comes to, by arithmetic alone."""

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Group

from twinstream.commands.arguments.grouped import grouped
from twinstream.commands.arguments.options import Json
from twinstream.commands.output import print_json, print_report
from twinstream.cost.bill import Bill, CostError, Prices, bill_of
from twinstream.cost.time import RunTime, TimedRun, rates_of, time_of, timed_sizes
from twinstream.cost.work import model_of_layers
from twinstream.hardware_profiles.clusters.loader import load_cluster, machine_of, place_names
from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.hardware_profiles.loader import load_machine
from twinstream.hardware_profiles.schema import Machine
from twinstream.schedule.node import Node, from_options, quantity, size
from twinstream.screens.fitted_table import FittedTable
from twinstream.screens.tables import seconds


class CostOptions(Node, title="Run and layout"):
    """What is trained and how it is laid out; None is the default of `TimedRun`."""

    tokens: Annotated[
        float | None, quantity("Tokens of the run; by default 20 a parameter.", "N", gt=0)
    ] = None
    seq_len: Annotated[int, size("Tokens of a sequence.")] = 2048
    batch_size: Annotated[int, size("Sequences of an optimizer step.")] = 2048
    microbatch_size: Annotated[
        int, size("Sequences in a stage at a time, over all replicas.")
    ] = 1  # fmt: skip
    pp: Annotated[int, size("Pipeline stages.")] = 1
    interleaving: Annotated[int, size("Runs of layers of a stage.")] = 1
    dp: Annotated[int, size("Replicas.")] = 1
    tp: Annotated[int, size("Parts of the inner width.")] = 1
    utilization: Annotated[
        float,
        quantity("Share of the peak that one matmul on one GPU reaches; 0.6 is optimistic.",
                 "SHARE", gt=0, le=1),
    ] = 0.6  # fmt: skip
    network_bandwidth: Annotated[
        float | None,
        quantity("What a GPU exchanges, both ways together; by default by the links in a node.",
                 "BYTES/S", gt=0),
    ] = None  # fmt: skip


@grouped()
def cost(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A preset, or a Hugging Face config.json.")
    ],
    shape: CostOptions,
    prices: Prices,
    machine: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="The profile of one GPU (`twinstream machines`)."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="The profile of several (`twinstream clusters`)."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what training MODEL costs, by arithmetic: FLOPs, days, GPU-hours, money.

    A rough answer at once, which takes all GPUs to have enough memory. For one that knows kernels,
    memory, contention and the layout, use `twinstream plan --cluster`.
    """
    place = _place(machine, cluster)
    run = _timed_run(model, shape, place)
    found = time_of(run)
    bill = bill_of(found.run_s, found.num_gpus, prices, place_names(place))
    if as_json:
        print_json({"model": model, "place": place.name} | asdict(found) | bill.model_dump())
    else:
        print_report(_screen(model, run, found, bill, place))


def _place(machine: str | None, cluster: str | None) -> Machine | Cluster:
    if cluster is not None and machine is None:
        return load_cluster(cluster)
    if machine is not None and cluster is None:
        return load_machine(machine)
    raise CostError("say on what: --machine NAME of one GPU, or --cluster NAME of several")


def _timed_run(model: str, shape: CostOptions, place: Machine | Cluster) -> TimedRun:
    sizes = shape.model_dump(exclude={"tokens", "network_bandwidth"})
    sizes |= timed_sizes(model_of_layers(model, shape.seq_len), shape.seq_len) | rates_of(place)
    if shape.network_bandwidth is not None:
        sizes["network_bytes_per_s"] = shape.network_bandwidth
    run = from_options(TimedRun, sizes | {"dataset_tokens": shape.tokens})
    if run.num_gpus > 1 and isinstance(place, Machine) and shape.network_bandwidth is None:
        raise CostError(
            f"{run.num_gpus:,} GPUs exchange data, and {place.name} is one: name what links them, "
            "--cluster NAME or --network-bandwidth"
        )
    return run


def _screen(
    model: str, run: TimedRun, found: RunTime, bill: Bill, place: Machine | Cluster
) -> Group:
    inner, outer, tokens = found.matmul_shape
    facts = {
        "model": f"{model}, {found.num_params / 1e9:,.2f} billion parameters",
        "tokens": f"{found.num_tokens:.3e}, {found.num_batches:,} batches of {run.batch_size:,} "
        f"sequences of {run.seq_len:,}",
        "FLOP": f"{found.flop_total:.3e}, {run.flop_per_batch:.3e} a batch",
        "GPUs": f"{found.num_gpus:,} of {place.name} = {run.pp:,} pp x {run.dp:,} dp x "
        f"{run.tp:,} tp",
        "a GPU": f"{run.flop_per_s / 1e12:,.1f} TFLOP/s, {run.utilization:.0%} of it in a matmul, "
        f"memory {run.memory_bytes_per_s / 1e9:,.0f} GB/s"
        + (f", network {run.network_bytes_per_s / 1e9:,.0f} GB/s" if found.num_gpus > 1 else ""),
        "a matmul": f"{inner:,} inner x {outer:,} outer x {tokens:,} tokens: "
        f"{seconds(found.matmul_s)}; 2 a layer",
        "a batch": f"{seconds(found.batch_s)}: bubble {seconds(found.bubble_s)}, computing "
        f"{seconds(found.compute_s)} beside exchanging {seconds(found.network_s)}, sum of "
        f"gradients {seconds(found.gradient_s)}",
        "utilization": f"{found.utilization:.4f} of the peak of all GPUs",
        **_charged(bill),
    }
    table = FittedTable(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, fact in facts.items():
        table.add_row(name, fact)
    shortage = _shortage(found, run, place)
    return Group(table, *([f"\n{shortage}"] if shortage else []))


def _charged(bill: Bill) -> dict[str, str]:
    shown = {"training": _duration(bill.run_days)}
    if bill.goodput is not None:
        shown |= {"goodput": f"{bill.goodput:.2%}", "wall time": _duration(bill.wall_days)}
    shown["GPU-hours"] = f"{bill.gpu_hours:,.1f}"
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


def _shortage(found: RunTime, run: TimedRun, place: Machine | Cluster) -> str | None:
    """Say that the weights alone exceed a GPU's memory; what else a step keeps is not counted."""
    room = (place if isinstance(place, Machine) else machine_of(place)).device_memory_bytes
    weights_bytes = found.num_params * run.value_bytes / (found.num_gpus // run.dp)
    if room is None or room.value is None or weights_bytes <= room.value:
        return None
    return (
        f"This does not fit: the weights alone take {weights_bytes / 1e9:,.0f} GB of each GPU, "
        f"which has {room.value / 1e9:,.0f} GB. Raise --pp or --tp; twinstream plan --cluster "
        "knows all of the memory, and what host memory takes."
    )

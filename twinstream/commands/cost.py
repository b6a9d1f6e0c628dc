"""`cost work`, `cost time`, `cost devices`: what a run comes to, by arithmetic alone."""

import typer

from twinstream.commands.arguments.grouped import grouped
from twinstream.commands.arguments.options import Json
from twinstream.commands.output import print_json, print_report
from twinstream.cost.bill import Prices
from twinstream.cost.devices import DeviceOptions, devices_document
from twinstream.cost.mesh_work import Batches, WorkMesh
from twinstream.cost.time import ChipOptions, Cut, Layout, Stack, time_document
from twinstream.cost.work import Counting, DecoderOptions, work_document
from twinstream.screens.cost_screens import devices_screen, time_screen, work_screen


@grouped("dataset_tokens")
def work(
    model: DecoderOptions,
    batches: Batches,
    mesh: WorkMesh,
    counting: Counting,
    prices: Prices,
    as_json: Json = False,
) -> None:
    """Count what a run computes and moves on a mesh: parameters, FLOPs, bytes by pass and axis.

    With --cluster-flop-rate also days, GPU-hours and money.
    """
    found = work_document(model.decoder(batches.seq_len), batches, mesh, counting, prices)
    print_json(found) if as_json else print_report(work_screen(found))


@grouped()
def time(
    stack: Stack,
    cut: Cut,
    chips: ChipOptions,
    layout: Layout,
    prices: Prices,
    as_json: Json = False,
) -> None:
    """Estimate how long a run takes on given chips: matmuls, bubble, exchanges; days and money.

    A rough answer at once, for sizes on a napkin. For one that knows kernels, memory, contention
    and the layout, and for mixtures of experts, use `twinstream plan --cluster`.
    """
    found = time_document(chips.setting(stack.complete(cut.seq_len), cut, layout), prices)
    print_json(found) if as_json else print_report(time_screen(found))


@grouped()
def devices(asked: DeviceOptions, as_json: Json = False) -> None:
    """Say the best degrees of parallelism by number of devices, and the utilisation they leave.

    Of a run of 20 tokens a parameter, on devices that are all joined by one network.
    """
    found = devices_document(asked)
    print_json(found) if as_json else print_report(devices_screen(found))


cost = typer.Typer(
    help="Say what a training run costs, by arithmetic: FLOPs, traffic, days, GPU-hours, money.",
    no_args_is_help=True,
)
cost.command()(work)
cost.command()(time)
cost.command()(devices)

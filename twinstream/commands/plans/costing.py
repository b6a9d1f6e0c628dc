"""`cost work` and `cost time`: what a training run comes to, by arithmetic alone."""

import typer

from twinstream.commands.arguments.grouped import grouped
from twinstream.commands.arguments.options import Json
from twinstream.commands.arguments.price_options import PriceOptions
from twinstream.commands.arguments.time_options import TimeOptions
from twinstream.commands.arguments.work_options import WorkOptions
from twinstream.commands.output import print_json, print_report
from twinstream.cost.time.document import time_document
from twinstream.cost.time.run import TimeCost
from twinstream.cost.work.document import work_document
from twinstream.cost.work.run import cost_of_work
from twinstream.screens.cost_screens import time_screen, work_screen


@grouped("num_layers", "d_model", "dataset_size")
def work(wanted: WorkOptions, charged: PriceOptions, as_json: Json = False) -> None:
    """Count what a run computes and moves on a mesh: parameters, FLOPs, bytes by pass and axis.

    With --cluster-flop-rate also days, GPU-hours and money.
    """
    found = cost_of_work(
        wanted.decoder(), wanted.batches(), wanted.mesh(), wanted.counting(), charged.prices()
    )
    if as_json:
        print_json(work_document(found))
    else:
        print_report(work_screen(found))


@grouped("n_layers", "d_model")
def time(wanted: TimeOptions, charged: PriceOptions, as_json: Json = False) -> None:
    """Estimate how long a run takes on given chips: matmuls, bubble, exchanges; days and money."""
    found = TimeCost.of(wanted.setting(), charged.prices())
    if as_json:
        print_json(time_document(found))
    else:
        print_report(time_screen(found))


cost = typer.Typer(
    help="Say what a training run costs, by arithmetic: FLOPs, traffic, days, GPU-hours, money.",
    no_args_is_help=True,
)
cost.command()(work)
cost.command()(time)

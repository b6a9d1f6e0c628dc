"""`simulate`: predict how a schedule would run on a machine."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from rich.console import RenderableType
from typer import Option

from twinstream.commands.arguments import options
from twinstream.commands.arguments.grouped import grouped
from twinstream.commands.arguments.outputs import output_option
from twinstream.commands.output import print_json, print_report, progress
from twinstream.commands.plan_screens import describe
from twinstream.commands.schedule_inputs import ScheduleInputs, inputs_of
from twinstream.hardware_profiles.schema import Machine
from twinstream.measures.expert_load import UNIFORM, LoadError, read_load, with_load
from twinstream.measures.metrics import Summary
from twinstream.measures.uncertainty import prediction_notes
from twinstream.planner.planner import gc_paused
from twinstream.schedule.document import Schedule
from twinstream.schedule.files import write_document
from twinstream.schedule.sizes import gib
from twinstream.schedule.timeline import Timeline
from twinstream.screens.plan_screen import plan_screen
from twinstream.screens.ranks_screen import mesh_screen
from twinstream.screens.tables import utilization_table


@grouped()
def simulate(
    schedule: options.ScheduleFile,
    where: options.Profiles,
    load: Annotated[
        str,
        Option(
            metavar="uniform|FILE",
            help="How rows go to experts: a JSON list of what each gets. It moves padding.",
        ),
    ] = UNIFORM,
    output: Annotated[Path | None, output_option("Write the predicted timeline here.")] = None,
    as_json: options.Json = False,
) -> None:
    """Predict a schedule's timeline on a machine, whatever machine it was planned for.

    Of a cluster's schedule --machine is the profile of a node.
    """
    with progress(f"simulating {schedule}", quiet=as_json), gc_paused():
        inputs = _with_load(inputs_of(schedule, where), load)
        if output is not None:
            inputs.require_as_in_its_file()
        timeline = inputs.timeline()
        summary = inputs.summary(timeline)
    if output is not None:
        write_document(timeline, output)
    if as_json:
        print_json(summary.model_dump() | about_prediction(inputs, timeline, summary))
        return
    print_report(*_screen(inputs, timeline, summary), *inputs.told)
    if output is not None:
        print_report(f"Wrote the timeline to {output}.")


def _with_load(inputs: ScheduleInputs, load: str) -> ScheduleInputs:
    if load == UNIFORM:
        return inputs
    schedule, found = inputs.schedule, read_load(Path(load))
    if not schedule.is_one_device:
        raise LoadError("--load is of one device's schedule, and this is of several")
    return replace(inputs, schedule=Schedule.of_rank(with_load(schedule.only, found)))


def about_prediction(
    inputs: ScheduleInputs, timeline: Timeline, summary: Summary
) -> dict[str, object]:
    """What JSON has of a prediction beside its summary."""
    found: dict[str, object] = {
        "simulated_on": timeline.provenance.where,
        "device_memory_missing_bytes": summary.missing_bytes,
    }
    schedule = inputs.schedule
    if inputs.place is None:
        notes = prediction_notes(schedule, inputs.machine, timeline)
        return found | describe(schedule) | {"utilization": timeline.utilization, "notes": notes}
    return found | {
        "stragglers": inputs.stragglers,
        "assumed": inputs.place.assumed or None,
        "num_ops": schedule.num_ops,
    }


def _screen(inputs: ScheduleInputs, timeline: Timeline, summary: Summary) -> list[RenderableType]:
    schedule, profile = inputs.schedule, inputs.machine
    if not schedule.is_one_device:
        return [mesh_screen(schedule, summary, timeline.provenance.where)]
    return [
        f"Simulated on {profile.name}:",
        *_told(summary.missing_bytes, profile),
        plan_screen(schedule, timeline, profile),
        "",
        utilization_table(timeline),
        *prediction_notes(schedule, profile, timeline),
    ]


def _told(missing: int, machine: Machine) -> list[str]:
    if not missing:
        return []
    has, name = machine.number("device_memory_bytes"), machine.name
    return [
        f"It does not fit there: it takes {gib(has + missing)} of device memory, and {name} has "
        f"{gib(has)}. Plan within that: --machine {name} --device-mem {int(has) // 2**20}MiB."
    ]

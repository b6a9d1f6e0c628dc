"""`simulate`: predict how a schedule would run on a machine."""

from pathlib import Path
from typing import Annotated

from twinstream import api
from twinstream.commands.arguments import options
from twinstream.commands.arguments.grouped import grouped
from twinstream.commands.arguments.inputs import checked_schedule, machine_of
from twinstream.commands.arguments.outputs import output_option
from twinstream.commands.cluster_inputs import holds_cluster, refuse_cluster_options
from twinstream.commands.documents.clusters import simulate_cluster_file
from twinstream.commands.output import print_json, print_report, progress
from twinstream.commands.plans.planning import describe
from twinstream.hardware_profiles.schema import Machine
from twinstream.measures.metrics import summarize
from twinstream.measures.uncertainty import prediction_notes, uncertainty_of
from twinstream.planner.request import caps_of
from twinstream.schedule.document import Schedule
from twinstream.schedule.files import write_document
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.sizes import gib
from twinstream.schedule.tensors import DEVICE
from twinstream.screens.plan_screen import plan_screen
from twinstream.screens.tables import utilization_table


@grouped()
def simulate(
    schedule: options.ScheduleFile,
    where: options.Profiles,
    output: Annotated[Path | None, output_option("Write the predicted timeline here.")] = None,
    as_json: options.Json = False,
) -> None:
    """Predict a schedule's timeline on a machine, whatever machine it was planned for.

    Of a cluster's schedule --machine is the profile of a node.
    """
    if holds_cluster(schedule):
        simulate_cluster_file(schedule, where, output, as_json=as_json)
        return
    refuse_cluster_options(schedule, where)
    with progress(f"simulating {schedule}", quiet=as_json):
        document = checked_schedule(schedule)
        profile = machine_of(document, where.machine)
        timeline = api.simulate(document, profile)
    missing = missing_bytes(document, profile)
    notes = prediction_notes(document, profile, timeline)
    if output is not None:
        write_document(timeline, output)
    if as_json:
        more: dict[str, object] = {
            "simulated_on": profile.name,
            "utilization": timeline.utilization,
            "device_memory_missing_bytes": missing,
            "uncertainty": uncertainty_of(profile, document),
            "notes": notes,
        }
        summary = summarize(document, timeline, profile)
        print_json(summary.model_dump() | describe(document) | more)
        return
    print_report(
        f"Simulated on {profile.name}:",
        *_told(missing, profile),
        plan_screen(document, timeline, profile),
        "",
        utilization_table(timeline),
        *notes,
    )
    if output is not None:
        print_report(f"Wrote the timeline to {output}.")


def missing_bytes(schedule: Schedule, machine: Machine) -> int:
    """Device memory that a schedule takes, with reserve and libraries, and the machine lacks."""
    has = caps_of(machine, None, None).device_bytes
    taken = arena_bytes(schedule, DEVICE) + schedule.caps.outside_arena_bytes
    return 0 if has is None else max(0, taken - has)


def _told(missing: int, machine: Machine) -> list[str]:
    if not missing:
        return []
    has, name = machine.number("device_memory_bytes"), machine.name
    return [
        f"It does not fit there: it takes {gib(has + missing)} of device memory, and {name} has "
        f"{gib(has)}. Plan within that: --machine {name} --device-mem {int(has) // 2**20}MiB."
    ]

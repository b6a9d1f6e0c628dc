"""`verify`: prove a schedule safe, and that it computes what it says."""

import typer

from twinstream import documents
from twinstream.commands.arguments.options import Json, ScheduleFile
from twinstream.commands.output import print_json, print_report, progress
from twinstream.commands.schedule_inputs import read_any_schedule
from twinstream.planner.planner import gc_paused
from twinstream.schedule.cluster.cluster_schedule import as_cluster

_BROKEN = 2


def verify(
    schedule: ScheduleFile,
    as_json: Json = False,
) -> None:
    """Prove that a schedule is safe and computes its training step; exit code 2 if it is not.

    Of a cluster's also that all classes of ranks agree in what they say, and none waits for ever.
    """
    with progress("verifying", quiet=as_json), gc_paused():
        document = read_any_schedule(schedule)
        found = documents.verify(document) or documents.conforms(document)
    mesh = as_cluster(document)
    num_ops = sum(len(mesh.of(one).ops) for one in mesh.classes)
    if as_json:
        shown = [{"kind": type(v).__name__, "rule": v.rule} | vars(v) for v in found]
        print_json({"ok": not found, "num_ops": num_ops, "violations": shown})
    elif not found:
        ranks, waits, together = "", "", ""
        if mesh is document:
            ranks = f" of {len(mesh.classes)} classes of {mesh.mesh.size:,} ranks"
            waits, together = ", none waits for ever", " together they are"
        print_report(
            f"{schedule}: {num_ops:,} ops{ranks}; safe in every execution{waits}, and{together} "
            f"exactly the training step of {mesh.model.get('name', 'the model')}."
        )
    else:
        print_report(*map(str, found))
    if found:
        typer.echo(f"error: {schedule} breaks {len(found)} rule(s)", err=True)
        raise typer.Exit(_BROKEN)

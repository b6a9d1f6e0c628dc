"""`verify`: prove a schedule safe, and that it computes what it says."""

import typer

from twinstream.clusters.conforms import conforms
from twinstream.commands.arguments.inputs import read_as
from twinstream.commands.arguments.options import Json, ScheduleFile
from twinstream.commands.output import print_json, print_report, progress
from twinstream.planner.planner import gc_paused
from twinstream.schedule.cluster.verify import verify as violations_of
from twinstream.schedule.document import Schedule

_BROKEN = 2


def verify(
    schedule: ScheduleFile,
    as_json: Json = False,
) -> None:
    """Prove that a schedule is safe and computes its training step; exit code 2 if it is not.

    Of a cluster's also that all classes of ranks agree in what they say, and none waits for ever.
    """
    with progress("verifying", quiet=as_json), gc_paused():
        document = read_as(Schedule, schedule)
        found = violations_of(document) or conforms(document)
    if as_json:
        shown = [{"kind": type(v).__name__, "rule": v.rule} | vars(v) for v in found]
        print_json({"ok": not found, "num_ops": document.num_ops, "violations": shown})
    elif not found:
        ranks, waits, together = "", "", ""
        if not document.is_one_device:
            ranks = f" of {len(document.classes)} classes of {document.mesh.size:,} ranks"
            waits, together = ", none waits for ever", " together they are"
        print_report(
            f"{schedule}: {document.num_ops:,} ops{ranks}; safe in every execution{waits}, "
            f"and{together} exactly the training step of {document.model.get('name', 'the model')}."
        )
    else:
        print_report(*map(str, found))
    if found:
        typer.echo(f"error: {schedule} breaks {len(found)} rule(s)", err=True)
        raise typer.Exit(_BROKEN)

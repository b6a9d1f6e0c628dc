"""`verify`: prove a schedule safe, and that it computes what it says."""

from pathlib import Path

import typer

from twinstream.clusters.conforms import conforms_cluster
from twinstream.commands.arguments.inputs import chain_of, read_schedule
from twinstream.commands.arguments.options import Json, ScheduleFile
from twinstream.commands.cluster_inputs import holds_cluster, read_cluster
from twinstream.commands.output import print_json, print_report, progress
from twinstream.planner.planner import gc_paused
from twinstream.schedule.cluster.verify_cluster import verify_cluster
from twinstream.schedule.proof.conforms import conforms
from twinstream.schedule.proof.verify import verify as safety_violations
from twinstream.schedule.proof.violations import Violation

_BROKEN = 2


def verify(
    schedule: ScheduleFile,
    as_json: Json = False,
) -> None:
    """Prove that a schedule is safe and computes its training step; exit code 2 if it is not.

    Of a cluster's also that all classes of ranks agree in what they say, and none waits for ever.
    """
    with progress("verifying", quiet=as_json), gc_paused():
        found, num_ops, proven = _of_cluster(schedule) if holds_cluster(schedule) else _of(schedule)
    if as_json:
        shown = [{"kind": type(v).__name__, "rule": v.rule} | vars(v) for v in found]
        print_json({"ok": not found, "num_ops": num_ops, "violations": shown})
    elif not found:
        print_report(f"{schedule}: {num_ops:,} ops{proven}.")
    else:
        print_report(*map(str, found))
    if found:
        typer.echo(f"error: {schedule} breaks {len(found)} rule(s)", err=True)
        raise typer.Exit(_BROKEN)


def _of(path: Path) -> tuple[list[Violation], int, str]:
    """Of a device's schedule what it breaks, how many ops it has, and what is proven if nothing."""
    document = read_schedule(path)
    found = safety_violations(document) + conforms(document, chain_of(document))
    proven = f"; safe in every execution, and exactly the training step of {document.model.name}"
    return found, len(document.ops), proven


def _of_cluster(path: Path) -> tuple[list[Violation], int, str]:
    """The same of a cluster's schedule; whether it conforms is asked of one that is safe."""
    document = read_cluster(path)
    found = verify_cluster(document) or conforms_cluster(document)
    num_ops = sum(len(document.of(one).ops) for one in document.classes)
    proven = (
        f" of {len(document.classes)} classes of {document.mesh.size:,} ranks; safe in every "
        f"execution, none waits for ever, and together they are exactly the training step of "
        f"{document.model.get('name', 'the model')}"
    )
    return found, num_ops, proven

"""`verify`: prove a schedule safe, and that it computes what it says."""

import typer

from twinstream.commands.arguments.inputs import chain_of, read_schedule
from twinstream.commands.arguments.options import Json, ScheduleFile
from twinstream.commands.output import print_json, print_report, progress
from twinstream.schedule.proof.conforms import conforms
from twinstream.schedule.proof.verify import verify as safety_violations

_BROKEN = 2


def verify(
    schedule: ScheduleFile,
    as_json: Json = False,
) -> None:
    """Prove that a schedule is safe and computes its training step; exit code 2 if it is not."""
    with progress("verifying", quiet=as_json):
        document = read_schedule(schedule)
        found = safety_violations(document) + conforms(document, chain_of(document))
    if as_json:
        shown = [{"kind": type(v).__name__, "rule": v.rule} | vars(v) for v in found]
        print_json({"ok": not found, "num_ops": len(document.ops), "violations": shown})
    elif not found:
        print_report(
            f"{schedule}: {len(document.ops):,} ops; safe in every execution, and exactly the "
            f"training step of {document.model.name}."
        )
    else:
        print_report(*map(str, found))
    if found:
        typer.echo(f"error: {schedule} breaks {len(found)} rule(s)", err=True)
        raise typer.Exit(_BROKEN)

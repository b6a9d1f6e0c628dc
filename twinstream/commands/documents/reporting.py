"""`report`: a schedule and its timelines as one page to look at."""

from pathlib import Path
from typing import Annotated

from twinstream import api
from twinstream.commands.arguments import options
from twinstream.commands.arguments.inputs import checked_schedule, machine_of, read_timelines
from twinstream.commands.arguments.outputs import output_option
from twinstream.commands.output import print_json, print_report, progress
from twinstream.measures.metrics import summarize
from twinstream.measures.uncertainty import uncertainty_of
from twinstream.schedule.files import write_text


def report(
    schedule: options.ScheduleFile,
    predicted: options.Predicted = None,
    measured: options.Measured = None,
    machine: options.MachineIfKnown = None,
    output: Annotated[Path, output_option("Write the page here.")] = Path("report.html"),
    as_json: options.Json = False,
) -> None:
    """Write one HTML page: streams, memory, links, idle time; predicted beside measured.

    Without --predicted the schedule is simulated.
    """
    from twinstream.report.report import report_html

    with progress(f"drawing {schedule}", quiet=as_json):
        document = checked_schedule(schedule)
        profile = machine_of(document, machine)
        before, after = read_timelines(predicted, measured)
        before = before or api.simulate(document, profile)
        html = report_html(document, profile, predicted=before, measured=after)
        write_text(html, output)
    size_bytes = output.stat().st_size
    if as_json:
        headline = {
            name: summarize(document, line, profile)
            for name, line in (("predicted", before), ("measured", after))
            if line is not None
        }
        told = uncertainty_of(profile, document)
        about = {"output": output, "size_bytes": size_bytes, "uncertainty": told}
        print_json(about | headline)
    else:
        print_report(f"Wrote {output}, {size_bytes / 1e6:.1f} MB; open it in any browser.")

"""`trace`: timelines as a file for ui.perfetto.dev and chrome://tracing."""

from pathlib import Path
from typing import Annotated

from twinstream import api
from twinstream.commands.arguments import options
from twinstream.commands.arguments.grouped import grouped
from twinstream.commands.arguments.inputs import checked_schedule, machine_of, read_timelines
from twinstream.commands.arguments.outputs import output_option
from twinstream.commands.cluster_inputs import holds_cluster, refuse_cluster_options
from twinstream.commands.documents.clusters import trace_cluster_file
from twinstream.commands.output import print_json, print_report, progress


@grouped()
def trace(
    schedule: options.ScheduleFile,
    where: options.Profiles,
    predicted: options.Predicted = None,
    measured: options.Measured = None,
    output: Annotated[
        Path, output_option("Write the trace here; a name with .gz is compressed.")
    ] = Path("trace.json.gz"),
    as_json: options.Json = False,
) -> None:
    """Export streams, waits and memory as a trace for ui.perfetto.dev or chrome://tracing.

    Without --predicted the schedule is simulated. Of a cluster's every class is a process.
    """
    if holds_cluster(schedule):
        trace_cluster_file(schedule, where, predicted, measured, output, as_json=as_json)
        return
    refuse_cluster_options(schedule, where)
    from twinstream.report.trace import trace_of, write_trace
    from twinstream.report.view import View

    with progress(f"tracing {schedule}", quiet=as_json):
        document = checked_schedule(schedule)
        before, after = read_timelines(predicted, measured)
        before = before or api.simulate(document, machine_of(document, where.machine))
        views = [View("predicted", document, before)]
        if after is not None:
            views.append(View("measured", document, after))
        found = trace_of(views)
        write_trace(found, output)
    size_bytes, about = output.stat().st_size, found["otherData"]
    if as_json:
        num_events = len(found["traceEvents"])
        print_json({"output": output, "size_bytes": size_bytes, "num_events": num_events} | about)
    else:
        print_report(
            *(f"{view.name}: {about[view.name]}" for view in views),
            f"Wrote {output}, {size_bytes / 1e6:.1f} MB; open it in ui.perfetto.dev.",
        )

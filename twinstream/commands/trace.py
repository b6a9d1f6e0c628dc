"""`trace`: timelines as a file for ui.perfetto.dev and chrome://tracing."""

from pathlib import Path
from typing import Annotated

from twinstream.commands.arguments import options
from twinstream.commands.arguments.grouped import grouped
from twinstream.commands.arguments.outputs import output_option
from twinstream.commands.cluster_inputs import inputs_of
from twinstream.commands.output import print_json, print_report, progress
from twinstream.planner.planner import gc_paused
from twinstream.schedule.analysis.comparison import by_rank


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
    from twinstream.report.trace import trace_of, write_trace
    from twinstream.report.view import MeshView

    with progress(f"tracing {schedule}", quiet=as_json), gc_paused():
        inputs = inputs_of(schedule, where)
        views = [MeshView("predicted", inputs.schedule, inputs.timeline(predicted))]
        if (after := inputs.measured(measured)) is not None:
            views.append(MeshView("measured", *by_rank(inputs.schedule, after)))
        found = trace_of(views)
        write_trace(found, output)
    size_bytes, about = output.stat().st_size, found["otherData"]
    if as_json:
        num_events = len(found["traceEvents"])
        print_json({"output": output, "size_bytes": size_bytes, "num_events": num_events} | about)
    else:
        print_report(
            *(f"{view.world}: {about[view.world]}" for view in views),
            *inputs.told,
            f"Wrote {output}, {size_bytes / 1e6:.1f} MB; open it in ui.perfetto.dev.",
        )

"""What the commands do with the schedule of a cluster, recognised by its content."""

from pathlib import Path

from twinstream.commands.arguments.options import Profiles
from twinstream.commands.cluster_inputs import (
    ClusterInputs,
    cluster_inputs,
)
from twinstream.commands.output import print_json, print_report, progress
from twinstream.measures.cluster_summary import ClusterSummary, summarize_cluster
from twinstream.planner.planner import gc_paused
from twinstream.schedule.cluster.cluster_timeline import ClusterTimeline
from twinstream.schedule.files import write_document, write_text
from twinstream.screens.cluster_screen import cluster_screen

_BROKEN = 2


def simulate_cluster_file(
    path: Path, where: Profiles, output: Path | None, *, as_json: bool
) -> None:
    """As `simulate`."""
    with progress(f"simulating {path}", quiet=as_json), gc_paused():
        inputs = cluster_inputs(path, where)
        if output is not None:
            inputs.require_as_in_its_file()
        timeline = inputs.timeline()
        summary = summarize_cluster(inputs.schedule, timeline, inputs.machine)
    if output is not None:
        write_document(timeline, output)
    if as_json:
        print_json(_figures(inputs, timeline, summary))
        return
    print_report(
        cluster_screen(inputs.schedule, summary, inputs.cluster.name),
        *inputs.told,
        *([f"Wrote the timeline to {output}."] if output is not None else []),
    )


def trace_cluster_file(
    path: Path, where: Profiles, predicted: Path | None,
    measured: Path | None, output: Path, *, as_json: bool,
) -> None:  # fmt: skip
    """As `trace`."""
    from twinstream.report.cluster.cluster_trace import cluster_trace
    from twinstream.report.trace import write_trace

    with progress(f"tracing {path}", quiet=as_json), gc_paused():
        inputs = cluster_inputs(path, where)
        after = inputs.measured(measured)
        found = cluster_trace(inputs.schedule, inputs.timeline(predicted), measured=after)
        write_trace(found, output)
    size_bytes, about = output.stat().st_size, found["otherData"]
    if as_json:
        num_events = len(found["traceEvents"])
        print_json({"output": output, "size_bytes": size_bytes, "num_events": num_events} | about)
    else:
        print_report(
            *(f"{name}: {about[name]}" for name in ("predicted", "measured") if name in about),
            *inputs.told,
            f"Wrote {output}, {size_bytes / 1e6:.1f} MB; open it in ui.perfetto.dev.",
        )


def report_cluster_file(
    path: Path, where: Profiles, predicted: Path | None,
    measured: Path | None, output: Path, *, as_json: bool,
) -> None:  # fmt: skip
    """As `report`."""
    from twinstream.report.cluster.cluster_page import cluster_html

    with progress(f"drawing {path}", quiet=as_json), gc_paused():
        inputs = cluster_inputs(path, where)
        timeline = inputs.timeline(predicted)
        summary = summarize_cluster(inputs.schedule, timeline, inputs.machine)
        after = inputs.measured(measured)
        html = cluster_html(
            inputs.schedule, timeline, summary, inputs.cluster.name, measured=after,
            notes=inputs.told,
        )  # fmt: skip
        write_text(html, output)
    size_bytes = output.stat().st_size
    if as_json:
        figures = _figures(inputs, timeline, summary)
        print_json({"output": output, "size_bytes": size_bytes, "predicted": figures})
    else:
        print_report(f"Wrote {output}, {size_bytes / 1e6:.1f} MB; open it in any browser.")


def _figures(
    inputs: ClusterInputs, timeline: ClusterTimeline, summary: ClusterSummary
) -> dict[str, object]:
    return summary.model_dump() | {
        "simulated_on": timeline.provenance.where,
        "stragglers": inputs.stragglers,
        "assumed": inputs.assumed or None,
        "device_memory_missing_bytes": summary.missing_bytes,
        "num_ops": sum(len(inputs.schedule.of(one).ops) for one in inputs.schedule.classes),
    }

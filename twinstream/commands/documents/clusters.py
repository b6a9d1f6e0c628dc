"""What the commands do with the schedule of a cluster, recognised by its content."""

from pathlib import Path
from typing import TYPE_CHECKING

from twinstream.commands.arguments.options import Profiles
from twinstream.commands.cluster_inputs import (
    ClusterInputs,
    cluster_inputs,
)
from twinstream.commands.output import print_json, print_report, progress
from twinstream.log.layout_choice import LayoutChoice
from twinstream.log.run_files import RunFiles
from twinstream.measures.cluster_summary import ClusterSummary, summarize_cluster
from twinstream.planner.planner import gc_paused
from twinstream.schedule.cluster.cluster_timeline import ClusterTimeline
from twinstream.schedule.files import read_document, write_document, write_text
from twinstream.screens.cluster_screen import cluster_screen

if TYPE_CHECKING:
    from twinstream.report.cluster.run_on_ranks import RunOnRanks


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
        figures = _both(inputs, timeline, summary, after)
        print_json({"output": output, "size_bytes": size_bytes} | figures)
    else:
        print_report(f"Wrote {output}, {size_bytes / 1e6:.1f} MB; open it in any browser.")


def ranks_of_run(files: RunFiles, where: Profiles) -> tuple["RunOnRanks", dict[str, object]]:
    """What the page of a run has of its ranks, and the figures that `--json` prints.

    Raises:
        TwinstreamError: as `cluster_inputs` and `ClusterInputs.measured`.
    """
    from twinstream.report.cluster.run_on_ranks import RunOnRanks

    inputs = cluster_inputs(files.cluster, where)
    timeline = inputs.timeline()
    summary = summarize_cluster(inputs.schedule, timeline, inputs.machine)
    after = inputs.measured(files.measured) if files.measured.exists() else None
    choice = read_document(LayoutChoice, files.layouts) if files.layouts.exists() else None
    ranks = RunOnRanks(inputs.schedule, timeline, summary, after, choice, inputs.told)
    return ranks, _both(inputs, timeline, summary, after)


def _both(
    inputs: ClusterInputs,
    timeline: ClusterTimeline,
    summary: ClusterSummary,
    measured: ClusterTimeline | None,
) -> dict[str, object]:
    found: dict[str, object] = {"predicted": _figures(inputs, timeline, summary)}
    if measured is not None:
        step_s = measured.step_ns / 1e9
        found["measured"] = {
            "step_time_s": step_s,
            "cold_step_time_s": measured.cold_ns / 1e9,
            "tokens_per_s": summary.tokens_per_step / step_s,
            "clock_error_ns": measured.clock_error_ns,
        }
    return found


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

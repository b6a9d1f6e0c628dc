"""A pass as a few lists of small integers, so that many timelines fit one file."""

from twinstream.schedule.analysis.comparison import kind_of
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.timeline import PassSpans, RankTimeline


def compact_timelines(
    schedule: RankSchedule, predicted: RankTimeline, measured: RankTimeline
) -> dict[str, object]:
    """The last pass of both, in whole microseconds.

    `kind` and `stream` index `kinds` and `streams`, op by op in the schedule's order; `starts_us`
    are from the pass's first start on.
    """
    kinds = [kind_of(op) for op in schedule.ops]
    streams = [str(op.stream) for op in schedule.ops]
    kind_names, stream_names = list(dict.fromkeys(kinds)), list(dict.fromkeys(streams))
    return {
        "kinds": kind_names,
        "streams": stream_names,
        "kind": [kind_names.index(kind) for kind in kinds],
        "stream": [stream_names.index(stream) for stream in streams],
        "predicted": _spans(predicted.passes[-1]),
        "measured": _spans(measured.passes[-1]),
    }


def _spans(spans: PassSpans) -> dict[str, list[int]]:
    zero_ns = min(spans.start_ns)
    pairs = zip(spans.start_ns, spans.end_ns, strict=True)
    return {
        "starts_us": [(start - zero_ns) // 1000 for start in spans.start_ns],
        "durations_us": [(end - start) // 1000 for start, end in pairs],
    }

"""Times of ops from events: precise after hours, and from a bounded number of events."""

from tests.helpers.fake_gpu import FakeGpu
from twinstream.executor.backends.op_times import MAX_PASSES_HELD, OpTimes


def timed(gpu: FakeGpu, times: OpTimes, number: int, base_ns: int, durations: list[int]) -> None:
    stream = gpu.streams[0]
    base = gpu.new_event(timing=True)
    base.record(stream)
    gpu.synchronize()
    times.begin_pass(number, base, base_ns)
    for duration in durations:
        gpu.now_ns += 10_000
        times.start(stream)
        gpu.synchronize()
        gpu.now_ns += duration
        times.end(stream)
        gpu.synchronize()


def test_spans_are_relative_to_the_runs_begin():
    gpu = FakeGpu(eager=0.0)
    gpu.stream("compute")
    times = OpTimes(gpu)
    timed(gpu, times, 7, 3_600_000_000_000, [5000, 2000])
    spans = times.spans()[7]
    assert spans.start_ns == (3_600_000_010_000, 3_600_000_025_000)
    assert spans.end_ns == (3_600_000_015_000, 3_600_000_027_000)


def test_the_number_of_events_does_not_grow_with_the_passes():
    gpu = FakeGpu(eager=0.0)
    gpu.stream("compute")
    times = OpTimes(gpu)
    for number in range(20):
        timed(gpu, times, number, 0, [1000] * 5)
        assert times.num_events <= MAX_PASSES_HELD * 10
    assert times.num_events == MAX_PASSES_HELD * 10
    assert sorted(times.spans()) == list(range(20))

"""Steps of uniform stages are those that the pipelines' papers derive, to the nanosecond."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.clusters.random_jobs import DENSE, job_of, lowered
from tests.simulator.cluster.uniform import LayerTimes, pipeline
from twinstream.simulator.replay import cold_step_ns, replay_cluster

TIMES = [(1000, 2000), (7, 3)]


@pytest.mark.parametrize(("forward", "backward"), TIMES)
@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
@pytest.mark.parametrize(
    ("pp", "microbatches", "layers"), [(1, 3, 2), (2, 1, 1), (4, 8, 8), (8, 8, 1), (8, 3, 4)]
)
def test_bubbles_of_gpipe_and_1f1b(order, pp, microbatches, layers, forward, backward):
    # Narayanan et al., arXiv:2104.04473, section 2.2.1: pp - 1 microbatches' time is lost
    step_ns = cold_step_ns(
        pipeline(order, pp, microbatches, layers=layers), LayerTimes(forward, backward)
    )
    assert step_ns == (microbatches + pp - 1) * layers * (forward + backward)


@pytest.mark.parametrize(("forward", "backward"), TIMES)
@pytest.mark.parametrize("order", ["interleaved", "ring"])
@pytest.mark.parametrize(
    ("pp", "microbatches", "virtual"), [(2, 2, 3), (4, 4, 2), (4, 8, 2), (4, 16, 4), (3, 6, 5)]
)
def test_virtual_stages_divide_the_bubble(order, pp, microbatches, virtual, forward, backward):
    # section 2.2.2 there, and Lamy-Poirier, arXiv:2211.05953: (pp - 1) / v
    step_ns = cold_step_ns(
        pipeline(order, pp, microbatches, virtual), LayerTimes(forward, backward)
    )
    assert step_ns == (microbatches * virtual + pp - 1) * (forward + backward)


@pytest.mark.parametrize("times", [(1000, 1000, 1000), (1000, 1500, 500), (1000, 1200, 900)])
@pytest.mark.parametrize(
    ("pp", "microbatches", "layers"), [(1, 2, 3), (2, 4, 8), (4, 8, 2), (8, 8, 1), (8, 16, 1)]
)
def test_zero_bubble_loses_what_weights_do_not_fill(pp, microbatches, layers, times):
    # Qi et al., arXiv:2401.10241, table 1, ZB-H1: (pp - 1) (F + B - W)
    forward, backward, weight = times
    step_ns = cold_step_ns(
        pipeline("zero_bubble", pp, microbatches, layers=layers), LayerTimes(*times)
    )
    bubble = (pp - 1) * (forward + backward - weight)
    assert step_ns == layers * (microbatches * (forward + backward + weight) + bubble)


@settings(max_examples=15)
@given(
    pp=st.integers(1, 5), groups=st.integers(1, 3), virtual=st.integers(1, 3),
    forward=st.integers(1, 10**9), backward=st.integers(1, 10**9),
)  # fmt: skip
def test_any_uniform_pipeline_takes_its_closed_form(pp, groups, virtual, forward, backward):
    microbatches, times = groups * pp, LayerTimes(forward, backward)
    both = forward + backward
    plain = (microbatches + pp - 1) * both
    assert cold_step_ns(pipeline("1f1b", pp, microbatches), times) == plain
    assert cold_step_ns(pipeline("gpipe", pp, microbatches), times) == plain
    if pp > 1:
        split = (microbatches * virtual + pp - 1) * both
        assert cold_step_ns(pipeline("interleaved", pp, microbatches, virtual), times) == split
        assert cold_step_ns(pipeline("ring", pp, microbatches, virtual), times) == split


@settings(max_examples=20)
@given(pp=st.integers(1, 5), more=st.integers(0, 5), times=st.tuples(*[st.integers(1, 10**6)] * 3))
def test_any_zero_bubble_pipeline_takes_its_closed_form(pp, more, times):
    # Where weights take no longer than the rest: W <= F and W <= B
    weight, forward, backward = sorted(times)
    step_ns = cold_step_ns(
        pipeline("zero_bubble", pp, pp + more), LayerTimes(forward, backward, weight)
    )
    bubble = (pp - 1) * (forward + backward - weight)
    assert step_ns == (pp + more) * (forward + backward + weight) + bubble


@pytest.mark.parametrize("order", ["gpipe", "1f1b", "interleaved", "ring", "zero_bubble"])
def test_passes_follow_one_another_without_a_gap(order):
    # the clipping norm of all stages is between them: a step is one of idle streams
    schedule, costs = pipeline(order, 4, 8), LayerTimes(1000, 2000, 1000)
    timeline = replay_cluster(schedule, costs, "uniform")
    assert timeline.step_ns == timeline.cold_ns == cold_step_ns(schedule, costs)
    assert timeline.period_passes == 1


@settings(max_examples=20)
@given(
    order=st.sampled_from(["gpipe", "1f1b", "ring", "zero_bubble"]),
    layers=st.lists(st.integers(0, 3), min_size=2, max_size=5).filter(any),
    microbatches=st.integers(1, 9),
)
def test_no_order_of_uneven_stages_beats_the_bound(order, layers, microbatches):
    """Of every stage: what the stages before it take for one microbatch, and its own for all."""
    shape = DENSE.model_copy(update={"num_layers": sum(layers)})
    fields = {"pp": len(layers), "pipeline": order, "stage_layers": tuple(layers)}
    schedule = lowered(job_of(microbatches, shape, **fields))
    step_ns = cold_step_ns(schedule, LayerTimes(10, 15, 5))
    late = order == "zero_bubble"  # weights' gradients may be beside backward of the stages before
    each, around = (30, 10) if late else (25, 25)
    assert step_ns >= max(
        around * sum(layers[:stage]) + microbatches * each * own for stage, own in enumerate(layers)
    )
    assert step_ns <= microbatches * each * sum(layers)

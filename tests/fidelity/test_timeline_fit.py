"""A profile's constants come back from a timeline that was simulated with them."""

import numpy as np
import pytest

from tests.helpers.plans import planned
from tests.helpers.tiny_chains import WORKLOADS, small
from twinstream.fidelity.timeline_fit import fit_timelines
from twinstream.hardware_profiles.calibration.parameters import (
    applied,
    cpu_parameters,
    declared_parameters,
    prepared,
)
from twinstream.hardware_profiles.calibration.timelines import mean_seconds, op_classes, works_of
from twinstream.hardware_profiles.loader import load_machine
from twinstream.models.lowering.lower import lower
from twinstream.models.presets import load_preset
from twinstream.schedule.document import Caps
from twinstream.schedule.timeline import PassSpans, TimelineMismatch
from twinstream.schedule.workload import Workload
from twinstream.simulator.replay import simulate_rank

H100 = load_machine("h100")
TRUTH = {"sustained": 0.9, "attention_forward": 1.2, "h2d": 0.93, "d2h": 0.95}
NOISE = 0.01


@pytest.fixture(scope="module")
def schedule():
    workload = Workload(seq_len=16384, chunk_tokens=16384, chunks_per_round=1, rounds_per_step=2)
    return planned(lower(load_preset("1b"), workload), H100, Caps(), "streaming")


@pytest.fixture(scope="module")
def timeline(schedule):
    """Of a machine with other constants, every span with noise of its own."""
    base = prepared(H100)
    parameters = declared_parameters(base, works_of(schedule))
    truth = applied(base, parameters, [TRUTH.get(p.name, 1.0) for p in parameters], "the truth")
    found, drawn = simulate_rank(schedule, truth), np.random.default_rng(0)
    noisy = tuple(
        spans.model_copy(
            update={
                "end_ns": tuple(
                    start + round((end - start) * np.exp(drawn.normal(0.0, NOISE)))
                    for start, end in zip(spans.start_ns, spans.end_ns, strict=True)
                )
            }
        )
        for spans in found.passes
    )
    return found.model_copy(update={"passes": noisy})


def test_known_constants_come_back_from_a_noisy_timeline(schedule, timeline):
    found = fit_timelines(H100, [(schedule, timeline)])
    by_name = {p.parameter.name: p for p in found.parameters}
    for name, factor in TRUTH.items():
        assert by_name[name].identified
        assert by_name[name].factor == pytest.approx(factor, abs=3 * by_name[name].posterior_width)
        assert by_name[name].posterior_width < 0.5 * by_name[name].parameter.width
    assert found.summary().mean_error < NOISE
    before = [abs(o.before_error) for o in found.observations]
    assert np.mean(before) > 4 * found.summary().mean_error


def test_a_cpu_that_is_slower_in_runs_is_predicted_within_other_caps_too():
    """A run says that it has 0.6 of its pace, and vector kernels 0.95 of that beside."""
    base, workload = load_machine("cpu"), WORKLOADS["sliced"]
    chain = lower(small("tiny"), workload)
    resident, streaming = (planned(chain, base, Caps(), p) for p in ("resident", "streaming"))
    truth_of = {"pace": 0.6, "vector": 0.95}
    parameters = cpu_parameters(base, works_of(resident))
    factors = [truth_of.get(p.name, 1.0) for p in parameters]
    truth = applied(base, parameters, factors, "the truth")
    found = fit_timelines(base, [(resident, simulate_rank(resident, truth))])
    fitted = found.machine("fitted", "a run")
    for schedule in (resident, streaming):
        true_ns = simulate_rank(schedule, truth).step_ns
        assert abs(simulate_rank(schedule, base).step_ns / true_ns - 1) > 0.2
        assert simulate_rank(schedule, fitted).step_ns == pytest.approx(true_ns, rel=0.01)


def test_runs_are_fitted_together(schedule, timeline):
    """A second run at half the speed: what is fitted lies between the two."""
    halved = timeline.model_copy(
        update={
            "passes": tuple(
                PassSpans(
                    start_ns=tuple(2 * t for t in spans.start_ns),
                    end_ns=tuple(2 * t for t in spans.end_ns),
                )
                for spans in timeline.passes
            )
        }
    )
    both = fit_timelines(H100, [(schedule, timeline), (schedule, halved)])
    alone = fit_timelines(H100, [(schedule, timeline)])
    assert len(both.observations) == 2 * len(alone.observations)
    sums_s = [sum(o.predicted_s for o in fit.observations) for fit in (alone, both)]
    assert sums_s[0] < sums_s[1] / 2 < 2 * sums_s[0]


def test_a_timeline_of_another_schedule_is_refused(schedule, timeline):
    other = timeline.model_copy(update={"op_ids": timeline.op_ids[::-1]})
    with pytest.raises(TimelineMismatch, match="ops that are not the schedule's"):
        fit_timelines(H100, [(schedule, other)])


def test_every_compute_and_copy_is_in_one_class(schedule):
    positions = [i for one in op_classes(schedule).values() for i in one]
    kinds = [schedule.ops[i].kind for i in range(len(schedule.ops))]
    assert sorted(positions) == [i for i, k in enumerate(kinds) if k in ("compute", "copy")]


def test_a_class_takes_the_mean_of_its_ops_in_all_passes(schedule, timeline):
    classes = op_classes(schedule)
    for positions, found in zip(classes.values(), mean_seconds(classes, timeline), strict=True):
        took_ns = [p.end_ns[i] - p.start_ns[i] for p in timeline.passes for i in positions]
        assert found == pytest.approx(np.mean(took_ns) / 1e9)

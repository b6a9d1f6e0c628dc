"""A profile's constants come back from a timeline that was simulated with them."""

import numpy as np
import pytest

from tests.helpers.plans import planned
from twinstream.fidelity.timeline_fit import fit_timeline
from twinstream.hardware_profiles.calibration.parameters import (
    applied,
    declared_parameters,
    prepared,
)
from twinstream.hardware_profiles.calibration.timelines import op_classes, works_of
from twinstream.hardware_profiles.errors import CalibrationError
from twinstream.hardware_profiles.loader import load_machine
from twinstream.models.lowering import lower
from twinstream.models.presets import load_preset
from twinstream.schedule.document import Caps
from twinstream.schedule.workload import Workload
from twinstream.simulator.replay import simulate

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
    found, drawn = simulate(schedule, truth), np.random.default_rng(0)
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
    found = fit_timeline(H100, schedule, timeline)
    by_name = {p.parameter.name: p for p in found.parameters}
    for name, factor in TRUTH.items():
        assert by_name[name].told
        assert by_name[name].factor == pytest.approx(factor, abs=3 * by_name[name].posterior_width)
        assert by_name[name].posterior_width < 0.5 * by_name[name].parameter.width
    assert found.summary().mean_error < NOISE
    before = [abs(o.before_error) for o in found.observations]
    assert np.mean(before) > 4 * found.summary().mean_error


def test_a_timeline_of_another_schedule_is_refused(schedule, timeline):
    other = timeline.model_copy(update={"op_ids": timeline.op_ids[::-1]})
    with pytest.raises(CalibrationError, match="ops that are not the schedule's"):
        fit_timeline(H100, schedule, other)


def test_every_compute_and_copy_is_in_one_class(schedule):
    positions = [i for one in op_classes(schedule) for i in one.positions]
    kinds = [schedule.ops[i].kind for i in range(len(schedule.ops))]
    assert sorted(positions) == [i for i, k in enumerate(kinds) if k in ("compute", "copy")]

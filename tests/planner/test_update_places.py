"""Where updates are made is the planner's choice: on the device, on the host, or some on either."""

from dataclasses import replace

import pytest

from tests.helpers.planning import cuts_of, plan_step, request_of
from tests.helpers.plans import MACHINE
from twinstream.hardware_profiles.loader import load_machine
from twinstream.models.presets import load_preset
from twinstream.models.providers.trained import trained_groups
from twinstream.models.recipes.recipe import Recipe
from twinstream.planner.choices import ChoiceError, Choices, Home, UpdatePlaces
from twinstream.planner.planner import Planner
from twinstream.planner.request import TrainingStep
from twinstream.schedule.document import Caps, RankSchedule
from twinstream.schedule.ops import HOST_COMPUTE, Compute, Copy
from twinstream.simulator.replay import steady_state

LINKED = load_machine("rtx4090")
SPEC = load_preset("1b").model_copy(update={"num_layers": 6})
CAPS = Caps(device_bytes=3 * 2**29, host_bytes=2**36)
SPLITS = ((), ("head",), ("5", "head"), ("4", "5", "head"), trained_groups(SPEC, Recipe()))


def step_with(groups: tuple[str, ...] = (), **fields: object) -> TrainingStep:
    return TrainingStep(512, 512, recipe=Recipe(host_groups=groups, **fields))  # type: ignore[arg-type]


def plan(where: UpdatePlaces, step: TrainingStep | None = None) -> RankSchedule:
    choices = Choices(effort="quick", optimizer=where)
    return plan_step(SPEC, step or step_with(), LINKED, CAPS, choices=choices)


def step_s(schedule: RankSchedule) -> float:
    return steady_state(schedule, LINKED).step_ns / 1e9


@pytest.fixture(scope="module")
def chosen() -> RankSchedule:
    return plan("auto")


def test_a_split_is_faster_than_all_updates_on_the_device_or_all_on_the_host(chosen):
    places = chosen.places
    assert places is not None and places.device_step_s and places.host_step_s
    assert 0 < places.groups_on_host < places.groups == 8
    assert step_s(chosen) < 0.9 * min(places.device_step_s, places.host_step_s)
    on_host = [op for op in chosen.ops if isinstance(op, Compute) and is_of_host(op)]
    assert {op.label.layer for op in on_host} <= {None, 5, 4, 3, 2, 1}, "what is updated last"
    assert len(chosen.recipe["host_groups"]) == places.groups_on_host  # type: ignore[arg-type]


def is_of_host(op: Compute) -> bool:
    return op.stream.queue == HOST_COMPUTE


def test_what_the_choice_is_held_against_is_what_plans_alone_would_be(chosen):
    assert chosen.places is not None
    assert step_s(plan("recipe")) == pytest.approx(chosen.places.device_step_s, rel=1e-9)
    assert step_s(plan("host")) == pytest.approx(chosen.places.host_step_s, rel=1e-9)


def test_loads_do_not_wait_behind_what_the_host_updates(chosen):
    """Copies of what it has updated, into places that it keeps, have a queue of their own."""
    makers = {op.op_id for op in chosen.ops if isinstance(op, Compute) and is_of_host(op)}
    copies = [op for op in chosen.ops if isinstance(op, Copy) and makers & set(op.waits)]
    assert {op.stream.queue for op in copies} <= {"h2d_updates"}
    assert any(op.stream.queue == "h2d" for op in chosen.ops)


def test_no_split_is_faster_than_the_bound_over_all_splits(chosen):
    assert chosen.bound is not None and chosen.bound.family_step_s is not None
    opened = cuts_of(SPEC, step_with(), LINKED, CAPS, choices=Choices(optimizer="auto"))
    workload = opened.usual[0].workload
    least_s = opened.bound_of(workload).step_s
    assert chosen.bound.family_step_s <= chosen.bound.step_s <= step_s(chosen)
    for groups in SPLITS:
        cuts = cuts_of(SPEC, step_with(groups), LINKED, CAPS)
        assert least_s <= cuts.bound_of(workload).step_s * (1 + 1e-6), groups
        raised = cuts.raised_bound(workload)
        assert raised is not None and raised.step_s >= cuts.bound_of(workload).step_s


def test_the_open_program_has_part_of_the_updates_on_the_host():
    opened = cuts_of(SPEC, step_with(), LINKED, CAPS, choices=Choices(optimizer="auto"))
    shares = opened.usual[0].bound.on_host.values()
    assert 0.0 < sum(shares) < len(shares)
    alone = cuts_of(SPEC, step_with(), LINKED, CAPS)
    assert opened.usual[0].bound.step_s < 0.9 * alone.usual[0].bound.step_s


def test_a_known_plan_of_a_split_stands_in_for_the_choice(chosen):
    """As `whatif` asks: the plan is known, and the answer is never slower."""
    choices = Choices(effort="quick", optimizer="auto")
    again = plan_step(SPEC, step_with(), LINKED, CAPS, choices=choices, known=[chosen])
    assert step_s(again) <= step_s(chosen)


@pytest.mark.parametrize(
    ("recipe", "homes", "caps", "why"),
    [
        ({"clips": True}, {}, CAPS, "max-grad-norm"),
        ({"update": "muon"}, {}, CAPS, "Muon"),
        ({"optimizer": "device_after_backward"}, {}, CAPS, "device_after_backward"),
        ({}, {"optimizer_state": "device"}, CAPS, "--home"),
        ({}, {}, CAPS.model_copy(update={"disk_bytes": 2**40}), "disk"),
    ],
)
def test_what_cannot_be_on_the_host_is_refused(
    recipe: dict[str, object], homes: dict[str, Home], caps: Caps, why: str
) -> None:
    request = request_of(
        load_preset("tiny"), TrainingStep(64, 64, recipe=Recipe(**recipe)),  # type: ignore[arg-type]
        MACHINE, caps, choices=Choices(homes, optimizer="auto"),
    )  # fmt: skip
    with pytest.raises(ChoiceError, match=why):
        Planner(steady_state).plan(replace(request))


def test_all_on_the_host_is_said_in_one_way_and_lists_of_before_are_the_same_plan() -> None:
    """Files of before list all groups; `optimal` keeps them on the host where the recipe says."""
    asked, every = plan("host"), trained_groups(SPEC, Recipe())
    assert asked.recipe["optimizer"] == "host" and "host_groups" not in asked.recipe
    listed = plan("recipe", step_with(every))
    said = plan("recipe", step_with(optimizer="host"))
    assert said == asked
    assert listed.ops == asked.ops and listed.slots == asked.slots
    back = plan_step(
        SPEC, step_with(optimizer="host"), LINKED, CAPS,
        choices=Choices(effort="quick", optimizer="auto"), known=[listed],
    )  # fmt: skip
    assert back.places is not None and back.places.groups_on_host < len(every)

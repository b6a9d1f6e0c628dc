"""What-ifs: answers are those of plans made for the changed machine or caps."""

import json
import re
from contextlib import contextmanager
from itertools import pairwise

import pytest

from tests.front_door.command_line import TINY_STEP, call, error_of
from twinstream import api
from twinstream.hardware_profiles.link import LINK_FIELDS
from twinstream.hardware_profiles.loader import load_machine, override
from twinstream.models.presets import load_model
from twinstream.planner.infeasible import InfeasiblePlan, Shortage
from twinstream.planner.search.chunking import TrainingStep
from twinstream.whatif.question import (
    Question,
    changed,
    properties_of,
    question_of,
    value_of,
)
from twinstream.whatif.sensitivity import what_if
from twinstream.whatif.target import _closed_in, _Search, _searched, _Tried, compute_limit

CAPS = ("--device-mem", "8MiB", "--host-mem", "20MiB", "--policy", "streaming")
ASK = ("whatif", *TINY_STEP, "--machine", "cpu", *CAPS)


def question(machine=None, *, policy="streaming", device_mem="8MiB"):
    machine = machine or load_machine("cpu")
    caps = api.caps_of(machine, device_mem, "20MiB")
    return question_of(load_model("tiny"), machine, TrainingStep(64, 256), caps, policy)


@pytest.fixture(scope="module")
def answer():
    return call(*ASK, "--changes", "-50%,+100%", "--jobs", 2, "--json").json()


def test_every_cap_and_number_that_the_plan_uses_is_asked_about(answer):
    names = {one["name"] for one in answer["sensitivities"]}
    assert names >= {"device memory", "host memory", "PCIe H2D", "PCIe D2H", "HBM", "host DRAM"}
    assert names >= {"compute peak", "launch latency", "copy latency"}
    assert all(len(one["changes"]) == 2 for one in answer["sensitivities"])


def test_an_answer_is_that_of_a_plan_for_the_changed_machine(answer, tmp_path):
    machine = tmp_path / "mine.toml"
    machine.write_text('base = "cpu"\nhbm_bytes_per_s = 10e9\n')
    half = call("plan", *TINY_STEP, "--machine", machine, *CAPS, "--json").json()["tokens_per_s"]
    hbm = next(one for one in answer["sensitivities"] if one["name"] == "HBM")
    assert hbm["value"] == 20
    assert hbm["changes"][0] == {"change": -0.5, "tokens_per_s": half, "reason": ""}


def test_an_answer_is_that_of_a_plan_within_the_changed_cap(answer):
    double = ("--device-mem", "16MiB", *CAPS[2:])
    wanted = call("plan", *TINY_STEP, "--machine", "cpu", *double, "--json").json()["tokens_per_s"]
    memory = next(one for one in answer["sensitivities"] if one["name"] == "device memory")
    assert memory["changes"][1]["tokens_per_s"] == wanted > answer["base"]["tokens_per_s"]


def test_a_change_that_leaves_no_plan_says_why(answer):
    host = next(one for one in answer["sensitivities"] if one["name"] == "host memory")
    found = {change["change"]: change for change in host["changes"]}
    assert found[-0.5]["tokens_per_s"] is None
    assert "--host-mem" in found[-0.5]["reason"]
    assert found[1.0]["tokens_per_s"] > 0


def test_only_the_property_asked_about_changes():
    base = question()
    for one in properties_of(base):
        other = changed(base, one, 2.0)
        link = {f"pcie_{way}_bytes_per_s" for way in ("h2d", "d2h")}
        if one.name == "PCIe, both ways":  # at most the sum of both directions
            assert value_of(other, one) == 16e9 < 2 * value_of(base, one)
        else:
            assert value_of(other, one) == 2 * value_of(base, one)
        follows = {"pcie_duplex_bytes_per_s"}
        numbers = {f for f in type(base.machine).model_fields if f not in ("name", "efficiency")}
        differ = {f for f in numbers if getattr(other.machine, f) != getattr(base.machine, f)}
        assert differ == set(one.fields) | (follows if link & set(one.fields) else set())
        assert (other.caps != base.caps) == (not one.fields)


@pytest.mark.parametrize("name", ["PCIe H2D", "device memory"])
def test_a_price_is_the_slope_of_the_lower_bound_over_the_value_shown(name):
    slow = override(load_machine("cpu"), {"pcie_h2d_bytes_per_s": 0.05e9})
    base = question(slow, device_mem="7MiB")
    one = next(p for p in properties_of(base) if p.name == name)
    found = what_if(base, (1e-4,), 2)
    price = next(s for s in found.sensitivities if s.name == name).price_tokens_per_s
    _, summary = base.planned()
    step = 1e-4
    less, more = (changed(base, one, 1 + s).planned()[0].bound.step_s for s in (-step, step))
    saved_s = (less - more) / (2 * step * value_of(base, one) / one.unit_size)
    assert saved_s > 0
    assert price == pytest.approx(saved_s * summary.tokens_per_s / summary.step_time_s, rel=0.02)


def test_the_smallest_value_that_reaches_a_target_is_found():
    base = call(*ASK, "--target", "1tok/s", "--json").json()["base"]["tokens_per_s"]
    target = 1.05 * base
    found = call(*ASK, "--target", f"{target:.3f}tok/s", "--json").json()
    assert found["target_tokens_per_s"] == pytest.approx(target, rel=1e-6)
    memory = next(one for one in found["found"] if one["name"] == "device memory")
    size = round(memory["value"] * 2**30)

    def speed(size_bytes):
        caps = ("--device-mem", size_bytes, *CAPS[2:])
        return call("plan", *TINY_STEP, "--machine", "cpu", *caps, "--json").json()["tokens_per_s"]

    assert speed(size) == memory["tokens_per_s"] >= target > speed(round(size / 1.021))
    host = next(one for one in found["found"] if one["name"] == "host memory")
    assert host["value"] is None
    assert host["tokens_per_s"] < target


def test_where_all_less_reaches_the_target_the_value_is_only_a_most():
    found = call(*ASK, "--target", "1tok/s", "--json").json()["found"]
    by_name = {one["name"]: one for one in found}
    link, memory = by_name["PCIe, all three"], by_name["device memory"]
    assert link["less_may_do"]
    assert link["value"] == pytest.approx(link["now"] / 64)
    assert not memory["less_may_do"]
    printed = call(*ASK, "--target", "1tok/s").out
    (line,) = (line for line in printed.splitlines() if line.startswith("PCIe"))
    assert f"at most {link['value']:,.4g} GB/s" in line
    assert printed.count("at most") == 1


@pytest.mark.parametrize("policy", ["streaming", "optimal"])
def test_more_of_anything_is_never_slower(policy):
    """Each plan on its own is: `streaming` by 28 % with a link 10 % faster, `optimal` by 4 %."""
    link = dict.fromkeys(LINK_FIELDS[:2], 1e9)
    memory = "8MiB" if policy == "streaming" else "5MiB"
    base = question(override(load_machine("cpu"), link), policy=policy, device_mem=memory)
    found = what_if(base, (-0.1, 0.1, 1.0) if policy == "streaming" else (0.1,), 2)
    for one in found.sensitivities:
        speeds = {change.change: change.tokens_per_s or 0.0 for change in one.changes}
        speeds[0.0] = found.base.tokens_per_s
        in_order = [speeds[change] for change in sorted(speeds, reverse=one.lower_is_better)]
        for worse, better in pairwise(in_order):
            assert better >= 0.999 * worse, one.name


def test_a_number_a_tenth_worse_costs_a_tenth_at_most():
    """The plan to start from would take no longer; one made anew is slower by up to 39 %."""
    link = dict.fromkeys(LINK_FIELDS[:2], 1e9)
    base = question(override(load_machine("cpu"), link))
    found = what_if(base, (-0.1, 0.1), 2)
    assert found.sensitivities
    for one in found.sensitivities:
        worse = min(change.tokens_per_s or 0.0 for change in one.changes)
        assert worse >= 0.9 * found.base.tokens_per_s, one.name


def test_a_search_never_gets_slower_with_more():
    link = dict.fromkeys(LINK_FIELDS[:2], 1e9)
    base = question(override(load_machine("cpu"), link), policy="streaming")
    (one,) = (p for p in properties_of(base) if p.name == "PCIe, all three")
    schedule, summary = base.planned()
    tried = _Tried(_Search(base, one, 1e9, False, summary.tokens_per_s, schedule), base)
    assert not tried.reaches(1.1)
    assert not tried.reaches(2.0)
    assert tried.speeds[1.0] <= tried.speeds[1.1] <= tried.speeds[2.0]
    alone = changed(base, one, 1.1).planned()[1].tokens_per_s
    assert alone < 0.8 * tried.speeds[1.1]


def test_a_search_counts_what_it_has_found(monkeypatch):
    counted = []

    @contextmanager
    def progress(what, total=None, *, quiet=False):
        yield lambda: counted.append(total)

    monkeypatch.setattr("twinstream.commands.plans.asking.progress", progress)
    assert call(*ASK, "--target", "1tok/s").code == 0
    assert counted == [3, 3, 3]


def test_a_memory_is_refused_once_and_its_smallest_size_is_found(monkeypatch):
    refused = []
    planned = Question.planned

    def counted(self, known=(), **more):
        try:
            return planned(self, known, **more)
        except InfeasiblePlan as error:
            refused.append(error.shortage.smallest_device_bytes)
            raise

    monkeypatch.setattr(Question, "planned", counted)
    base = question()
    (memory,) = (one for one in properties_of(base) if one.name == "device memory")
    found = _searched(_Search(base, memory, 1.0, True, 2.0, base.planned()[0]))
    (smallest_bytes,) = refused
    assert found.value is not None
    assert 1.0 <= found.value * 2**30 / smallest_bytes < 1.03


def test_less_than_a_refusal_says_would_do_is_tried_where_less_may_do(monkeypatch):
    """Refused once with caps that would do, then, as long as less than those is tried, without."""
    enough, asked = 5 * 2**20, []
    base = question(policy="optimal")
    schedule, summary = base.planned()

    def planned(self, known=(), *, name_caps=True):
        if (size := self.caps.device_bytes) >= enough:
            return schedule, summary
        asked.append((size, name_caps))
        names = (7 * 2**20 if name_caps else None), None
        raise InfeasiblePlan(Shortage("optimal", "device", size, 1, "a", *names, smallest=False))

    monkeypatch.setattr(Question, "planned", planned)
    (memory,) = (one for one in properties_of(base) if one.name == "device memory")
    found = _searched(_Search(base, memory, 1.0, True, summary.tokens_per_s, schedule))
    assert found.value is not None
    assert 1.0 <= found.value * 2**30 / enough < 1.03
    assert [named for _, named in asked] == [True, *[False] * (len(asked) - 1)]
    assert len(asked) > 1


def test_what_is_found_quickly_is_confirmed_with_the_effort_asked_for(monkeypatch):
    """Quick plans need 20 MiB, others 10: the value is the quick ones', its plan another's."""
    base, asked = question(policy="optimal"), []
    schedule, summary = base.planned()
    faster = summary.model_copy(update={"tokens_per_s": 2 * summary.tokens_per_s})

    def planned(self, known=(), *, name_caps=True):
        needed_mib = 20.0 if self.choices.effort == "quick" else 10.0
        asked.append((self.choices.effort, self.caps.device_bytes / 2**20))
        return schedule, faster if asked[-1][1] >= needed_mib else summary

    monkeypatch.setattr(Question, "planned", planned)
    (memory,) = (one for one in properties_of(base) if one.name == "device memory")
    target, now = 1.5 * summary.tokens_per_s, summary.tokens_per_s
    found = _searched(_Search(base, memory, target, False, now, schedule))
    (confirmed_mib,) = [size_mib for effort, size_mib in asked if effort == "normal"]
    assert found.value == pytest.approx(confirmed_mib / 1024)
    assert 20 <= confirmed_mib <= 20 * 1.02
    assert len(asked) < 12


def test_a_target_between_two_speeds_is_closed_in_on_from_both_sides():
    """On a line few plans do; at a cliff the middle is tried now and then."""
    for speed, most in ((lambda f: 100.0 * f, 3), (lambda f: 10.0 + 190.0 * (f > 1.37), 14)):
        tried = StraightTried(speed)
        found = _closed_in(tried, 150.0, 1.0, 2.0)
        assert speed(found) >= 150.0 > speed(found / 1.0201)
        assert len(tried.speeds) - 2 <= most


class StraightTried:
    def __init__(self, speed):
        self.speed, self.speeds = speed, {1.0: speed(1.0), 2.0: speed(2.0)}

    def reaches(self, factor):
        self.speeds[factor] = self.speed(factor)
        return self.speeds[factor] >= 150.0


def test_less_than_now_is_found_where_the_target_is_reached_already():
    found = call(*ASK, "--target", "50%", "--json").json()
    limit = found["compute_limit_tokens_per_s"]
    assert found["target_tokens_per_s"] == pytest.approx(limit / 2)
    memory = next(one for one in found["found"] if one["name"] == "device memory")
    assert memory["value"] < memory["now"]
    assert memory["tokens_per_s"] >= limit / 2


def test_the_compute_limit_is_what_a_resident_plan_comes_near_to():
    machine = load_machine("cpu")
    schedule, summary = question(policy="resident", device_mem="1GiB").planned()
    limit = compute_limit(schedule, machine)
    assert 0.95 * limit < summary.tokens_per_s <= limit
    tight, slower = question(device_mem="6MiB").planned()
    assert slower.recompute_fraction > 0 or slower.tokens_per_s < summary.tokens_per_s
    assert compute_limit(tight, machine) == pytest.approx(limit, rel=0.2)


def test_the_table_fits_and_the_page_has_the_chart(tmp_path):
    path = tmp_path / "whatif.html"
    outcome = call(*ASK, "--changes", "+10%", "-o", path)
    assert outcome.code == 0, outcome.err
    assert max(map(len, outcome.out.splitlines())) <= 100
    (figure,) = re.findall(r"data-figure=.*?>(.*?)</script>", path.read_text())
    (bars,) = json.loads(figure)["data"]
    assert "PCIe H2D" in bars["y"]
    printed = call(*ASK, "--target", "60%").out
    assert "device memory" in printed
    assert max(map(len, printed.splitlines())) <= 100


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--changes", "lots"), "-50%,-10%"),
        (("--changes", "0%"), "not 0"),
        (("--changes", "-100%"), "more than -100%"),
        (("--changes", "+10%,+10%"), "twice"),
        (("--target", "fast"), "12000tok/s"),
        (("--target", "120%"), "less than 100%"),
        (("--target", "0tok/s"), "12000tok/s"),
        (("--policy", "greedy"), "'greedy'"),
        (("--device-mem", "1MiB"), "--device-mem"),
    ],
)
def test_a_question_that_is_wrong_gets_one_message_that_helps(options, said):
    assert said in error_of(*ASK, *options)


def test_a_chart_of_a_target_is_refused(tmp_path):
    assert "--target" in error_of(*ASK, "--target", "50%", "-o", tmp_path / "chart.html")

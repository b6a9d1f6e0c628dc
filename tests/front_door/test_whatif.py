"""What-ifs: answers are those of plans made for the changed machine or caps."""

import json
import re
from contextlib import contextmanager
from itertools import pairwise

import pytest

import twinstream as ts
from tests.front_door.command_line import TINY_STEP, call, error_of
from twinstream.hardware_profiles.link import LINK_FIELDS
from twinstream.hardware_profiles.loader import load_machine, override
from twinstream.study.one_device import DeviceQuery
from twinstream.study.whatif.whatif import usual_changes, whatif

PLANNER = ts.Planner(ts.steady_state)
CAPS = ("--device-mem", "8MiB", "--host-mem", "20MiB", "--policy", "streaming")
ASK = ("whatif", *TINY_STEP, "--machine", "cpu", *CAPS)


def question(machine="cpu", *, policy="streaming", device_mem="8MiB"):
    step = ts.TrainingStep(64, 256)
    request = ts.PlanRequest.of(
        "tiny", machine, step=step, device_mem=device_mem, host_mem="20MiB", policy=policy
    )
    return DeviceQuery(request)


def value_of(query, name):
    return next(one.values[0] for one in query.properties if one.name == name)


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
    for one in base.properties:
        other = base.changed(one.times(2.0))
        link = {f"machine.pcie_{way}_bytes_per_s" for way in ("h2d", "d2h")}
        if one.name == "PCIe, both ways":  # at most the sum of both directions
            assert value_of(other, one.name) == 16e9 < 2 * value_of(base, one.name)
        else:
            assert value_of(other, one.name) == 2 * value_of(base, one.name)
        follows = {"machine.pcie_duplex_bytes_per_s"}
        before, after = base.request.machine, other.request.machine
        numbers = {f for f in type(before).model_fields if f not in ("name", "efficiency")}
        differ = {f"machine.{f}" for f in numbers if getattr(after, f) != getattr(before, f)}
        of_caps = {"device_mem", "host_mem"} & set(one.fields)
        assert differ == set(one.fields) - of_caps | (follows if link & set(one.fields) else set())
        assert (other.request.caps != base.request.caps) == bool(of_caps)


def test_a_price_is_the_slope_of_the_lower_bound_over_the_value_shown():
    slow = override(load_machine("cpu"), {"pcie_h2d_bytes_per_s": 0.05e9})
    base, step = question(slow, device_mem="7MiB"), 1e-4
    answer = base.answer()
    found = whatif(base, usual_changes(base, (1 + step,)), num_jobs=2)
    prices = {s.name: s.price_tokens_per_s for s in found.sensitivities}
    for one in base.properties:
        if one.name in ("PCIe H2D", "device memory"):
            less, more = (
                base.changed(one.times(1 + change)).answer(planner=PLANNER).schedule.bound.step_s
                for change in (-step, step)
            )
            saved_s = (less - more) / (2 * step * one.now)
            assert saved_s > 0
            worth = saved_s * answer.tokens_per_s / answer.step_s
            assert prices[one.name] == pytest.approx(worth, rel=0.02)


def test_the_smallest_value_that_reaches_a_target_is_found(answer):
    target = 1.05 * answer["base"]["tokens_per_s"]
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


def test_where_all_less_reaches_the_target_the_value_is_only_a_most(monkeypatch):
    counted = []

    @contextmanager
    def progress(what, total=None, *, quiet=False):
        yield lambda: counted.append(total)

    monkeypatch.setattr("twinstream.commands.whatif.progress", progress)
    printed = call(*ASK, "--target", "1tok/s").out
    assert counted == [3, 3, 3]
    (line,) = (line for line in printed.splitlines() if line.startswith("PCIe"))
    assert f"at most {load_machine('cpu').number('pcie_h2d_bytes_per_s') / 64e9:,.4g} GB/s" in line
    assert printed.count("at most") == 1


@pytest.mark.parametrize("policy", ["streaming", "optimal"])
def test_more_of_anything_is_never_slower(policy):
    """Each plan on its own is: `streaming` by 28 % with a link 10 % faster, `optimal` by 4 %."""
    link = dict.fromkeys(LINK_FIELDS[:2], 1e9)
    memory = "8MiB" if policy == "streaming" else "5MiB"
    base = question(override(load_machine("cpu"), link), policy=policy, device_mem=memory)
    factors = (0.9, 1.1, 2.0) if policy == "streaming" else (1.1,)
    found = whatif(base, usual_changes(base, factors), num_jobs=2)
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
    found = whatif(base, usual_changes(base, (0.9, 1.1)), num_jobs=2)
    assert found.sensitivities
    for one in found.sensitivities:
        worse = min(change.tokens_per_s or 0.0 for change in one.changes)
        assert worse >= 0.9 * found.base.tokens_per_s, one.name


def test_less_than_now_is_found_where_the_target_is_reached_already():
    found = call(*ASK, "--target", "50%", "--json").json()
    limit = found["compute_limit_tokens_per_s"]
    assert found["target_tokens_per_s"] == pytest.approx(limit / 2)
    memory = next(one for one in found["found"] if one["name"] == "device memory")
    assert memory["value"] < memory["now"]
    assert memory["tokens_per_s"] >= limit / 2


def test_the_compute_limit_is_what_a_resident_plan_comes_near_to():
    resident, streaming = (
        question(policy="resident", device_mem="1GiB"), question(device_mem="6MiB")
    )  # fmt: skip
    fast, slow = resident.answer(), streaming.answer()
    limit = fast.compute_limit()
    assert 0.95 * limit < fast.tokens_per_s <= limit
    assert slow.summary.recompute_fraction > 0 or slow.tokens_per_s < fast.tokens_per_s
    assert slow.compute_limit() == pytest.approx(limit, rel=0.2)


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


def test_what_is_set_of_a_machine_changes_together(tmp_path):
    """A memory may be more than the machine has; the plan from before runs as it is."""
    page = tmp_path / "set.html"
    change = ("--set", "device_mem=16MiB", "--set", "pcie_h2d_bytes_per_s=16e9")
    (found,) = call(*ASK, *change, "--json", "-o", page).json()["answers"]
    assert found["values"] == {"device_mem": "16MiB", "machine.pcie_h2d_bytes_per_s": 16e9}
    machine = tmp_path / "mine.toml"
    link = "pcie_h2d_bytes_per_s = 16e9\npcie_duplex_bytes_per_s = 18e9\n"  # 12 of 16 GB/s
    machine.write_text(f'base = "cpu"\n{link}')
    double = ("--device-mem", "16MiB", *CAPS[2:], "--json")
    planned = call("plan", *TINY_STEP, "--machine", machine, *double).json()
    assert found["anew"]["tokens_per_s"] == planned["tokens_per_s"]
    assert found["kept"]["memory_bytes"] <= 8 * 2**20 < found["anew"]["memory_bytes"]
    assert "plan kept" in page.read_text()
    half = call(*ASK, "--set", "device_mem=4MiB", "--json").json()["answers"][0]
    assert half["kept"] is None and "the plan from before needs" in half["kept_reason"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hbm_bytes=1", "'hbm_bytes' is nothing of a plan or a machine: did you mean"),
        ("tp=2", "'tp' is nothing of a plan or a machine"),
        ("seq_len=2.5", "--set seq_len needs a positive whole number"),
        ("policy=greedy", "--set policy 'greedy' is unknown; known: "),
        ("device_mem=24XiB", "--set device_mem is no size: cannot read"),
        ("pcie_h2d_bytes_per_s=fast", "--set pcie_h2d_bytes_per_s needs a number, got 'fast'"),
    ],
)
def test_what_cannot_be_set_of_a_machine_is_one_message(text, said):
    message = error_of(*ASK, "--set", text)
    assert said in message
    assert message.startswith("error: ") and message.count("\n") == 1

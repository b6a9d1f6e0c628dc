"""What-ifs of clusters: answers are those of plans made for the changed cluster."""

import json
import re
from dataclasses import replace

import pytest

from tests.front_door.command_line import call, error_of
from twinstream.clusters.predict import predict
from twinstream.hardware_profiles.clusters.loader import load_cluster
from twinstream.models.parallel.layout import Layout
from twinstream.study.layouts import LayoutQuery
from twinstream.study.questions import query_of
from twinstream.study.whatif.whatif import Change, usual_changes, whatif, written_change

STEP = ("--model", "1b", "--seq-len", 512, "--global-batch", 32)
ON = ("--cluster", "h100_dgx", "--gpus", 16, "--pp", 1, "--zero", 1)
ASK = ("whatif", *STEP, *ON, "--jobs", 1)


def question(gpus=16, **fixed) -> LayoutQuery:
    step = {"model": "1b", "seq_len": 512, "global_batch": 32}
    found = query_of({**step, "cluster": "h100_dgx", "gpus": gpus, **fixed})
    assert isinstance(found, LayoutQuery)
    return found


@pytest.fixture(scope="module")
def answer(tmp_path_factory):
    page = tmp_path_factory.mktemp("whatif") / "page.html"
    told = call(*ASK, "--price-per-gpu-hour", 2, "-o", page, "--json").json()
    return told | {"page": page.read_text()}


def of(answer, name):
    return next(one for one in answer["answers"] if one["name"] == name)


def plan_of(*options, cluster="h100_dgx", gpus=16):
    on = ("--cluster", cluster, "--gpus", gpus, *ON[4:])
    return call("plan", *STEP, *on, *options, "--json").json()["layouts"][0]


def test_links_memory_compute_and_gpus_are_asked_about(answer):
    assert {one["name"] for one in answer["answers"]} == {
        "network x 2", "links in a node x 2", "HBM x 2", "compute peak x 2", "GPUs x 2",
        "device memory x 0.5", "device memory x 2",
    }  # fmt: skip
    gains = [one["anew"]["tokens_per_s"] for one in answer["answers"]]
    assert gains == sorted(gains, reverse=True)


def test_the_step_to_start_from_is_that_of_plan(answer):
    planned = plan_of()
    assert answer["base"]["step_s"] <= planned["step_s"]
    if answer["base"]["layout"] == planned["layout"]:
        assert answer["base"]["step_s"] == planned["step_s"]


def test_an_answer_is_no_slower_than_a_plan_for_the_changed_cluster(answer, tmp_path):
    mine = tmp_path / "mine.toml"
    mine.write_text('base = "h100_dgx"\nnic_bytes_per_s = 1e11\n')
    found, planned = of(answer, "network x 2"), plan_of(cluster=mine)
    assert (found["now"], found["then"]) == ("50", "100 GB/s")
    assert found["anew"]["step_s"] <= planned["step_s"]
    layout = Layout.model_validate_json(json.dumps(answer["base"]["layout"]))
    job = question().job.model_copy(update={"layout": layout})
    assert found["kept"]["step_s"] == predict(job, load_cluster(mine)).step_s


def test_a_layout_that_is_kept_has_as_many_replicas_as_gpus_allow(answer):
    found, base = of(answer, "GPUs x 2"), answer["base"]["layout"]
    assert found["values"] == {"gpus": 32}
    if found["kept"] is not None:
        assert found["kept"]["layout"] == base | {"dp": 2 * base["dp"]}
    else:
        assert "divisible" in found["kept_reason"]
    assert found["anew"]["step_s"] <= plan_of(gpus=32)["step_s"]


def test_a_layout_that_is_kept_is_never_faster_than_the_one_searched(answer):
    for one in answer["answers"]:
        assert one["kept"] is None or one["anew"]["step_s"] <= one["kept"]["step_s"], one["name"]
        if one["name"].endswith("x 2") and "GPUs" not in one["name"]:
            assert one["anew"]["step_s"] <= answer["base"]["step_s"], one["name"]


def test_money_is_of_a_billion_tokens_or_of_the_run(answer):
    one = of(answer, "GPUs x 2")["anew"]
    assert one["bill"]["money"] == pytest.approx(1e9 / one["tokens_per_s"] / 3600 * 32 * 2)
    charged = ("--tokens", 2e9, "--checkpoint-s", 10, "--mtbf-hours", 20, "--restart-s", 60)
    told = call(*ASK, "--set", "gpus=32", "--set", "price_per_gpu_hour=3", *charged, "--json")
    (found,) = told.json()["answers"]
    bill = found["anew"]["bill"]
    interval, mtbf = (2 * 10 * 36000) ** 0.5, 36000  # twice the GPUs fail twice as often
    assert bill["goodput"] == pytest.approx(1 - 10 / interval - (interval / 2 + 60) / mtbf)
    wall_s = 2e9 / found["anew"]["tokens_per_s"] / bill["goodput"]
    assert bill["money"] == pytest.approx(wall_s / 3600 * 32 * 3)
    assert told.json()["base"]["bill"]["money"] is None


def test_the_smallest_value_that_reaches_a_target_is_found():
    asked = question(tp=1, pp=1, zero=1, micro_batch=2)
    target = 1.02 * asked.answer().tokens_per_s
    ask = (*ASK, "--tp", 1, "--micro-batch", 2, "--target", f"{target:.3f}tok/s")
    found = call(*ask, "--json").json()
    assert found["target_tokens_per_s"] == pytest.approx(target, rel=1e-6)
    base, share = found["base"], found["base"]["shares"]["compute"]
    assert found["compute_limit_tokens_per_s"] == pytest.approx(base["tokens_per_s"] / share)
    (peak,) = (one for one in found["found"] if one["name"] == "compute peak")

    def speed(tflop_per_s: float) -> float:
        changed = asked.changed({"machine.peak_bf16_flop_per_s": tflop_per_s * 1e12})
        return changed.answer().tokens_per_s

    least = peak["value"]
    assert speed(least) == pytest.approx(peak["tokens_per_s"], rel=1e-6)
    assert peak["tokens_per_s"] >= target > speed(least / 1.021)
    (memory,) = (one for one in found["found"] if one["name"] == "device memory")
    assert memory["value"] is None and memory["tokens_per_s"] < target
    (gpus,) = (one for one in found["found"] if one["name"] == "GPUs")
    assert (gpus["now"], gpus["tried"] % 8) == (16, 0)


def test_where_less_reaches_the_target_too_the_value_is_only_a_most():
    printed = call(*ASK, "--tp", 1, "--micro-batch", 2, "--target", "1tok/s").out
    (line,) = (line for line in printed.splitlines() if line.startswith("network"))
    assert "at most 0.7812 GB/s" in line  # 50 GB/s / 64
    assert max(map(len, printed.splitlines())) <= 100


def test_what_is_set_changes_together_and_a_layout_may_be_refused():
    told = call(
        *ASK, "--set", "device_memory_bytes=1GB", "--set", "nic_bytes_per_s=1e11"
    )  # fmt: skip
    assert told.code == 0, told.err
    printed = " ".join(told.out.split())
    assert "device_memory_bytes=1GB, nic_bytes_per_s=1e11" in printed
    assert "layout kept: stage 0 does not fit" in printed
    assert "fits: the leanest" in printed
    assert max(map(len, told.out.splitlines())) <= 100


def test_a_layout_found_with_a_change_is_tried_without_it(monkeypatch):
    """The search to start from is made to miss what the others find."""
    base = question(tp=1, pp=1, zero=1, recompute="none")
    calls = []

    def search(self, progress=None):
        calls.append(self)
        fixed = {"micro_batch": 1} if len(calls) == 1 else {"micro_batch": 2, "dp": 8}
        one = replace(self, fixed={**self.fixed, **fixed}, num_gpus=8)
        return one_search(replace(one, keep=1))

    one_search = LayoutQuery.search
    eight = replace(base, num_gpus=8)
    monkeypatch.setattr(LayoutQuery, "search", search)
    monkeypatch.setattr(
        "twinstream.study.processes.in_processes",
        lambda work, items, jobs, begin: [(one, work(one, None)) for one in items],
    )
    change = Change("memory", {"machine.device_memory_bytes": 1e11})
    found = whatif(eight, [change])
    assert found.base.layout.micro_batch == 2
    base = found.base.model_copy(update={"figures": {}})
    assert found.answers[0].kept == found.answers[0].anew == base


def test_replicas_of_a_kept_layout_make_up_the_gpus_and_what_is_fixed_wins():
    before = Layout(tp=2, pp=1, dp=8, micro_batch=2)
    for asked, layout in (
        (question(32), {"dp": 16}),
        (question(8), {"dp": 4}),
        (question(16, tp=4), {"tp": 4, "dp": 4}),
        (question(16, zero=3, micro_batch=1), {"zero": 3, "micro_batch": 1}),
        (question(7), {}),  # refused afterwards
    ):
        assert asked.kept_job(before).layout == before.model_copy(update=layout)


def test_of_one_node_the_network_is_left_out_and_narrow_peaks_change_too():
    names = [one.name for one in usual_changes(question(8))]
    assert "network x 2" not in names and "links in a node x 2" in names
    narrow = question().changed({"precision": "fp8"})
    (peak,) = (one for one in usual_changes(narrow) if one.name == "compute peak x 2")
    assert set(peak.values) == {"machine.peak_fp8_flop_per_s", "machine.peak_bf16_flop_per_s"}
    gpus = [one.then for one in usual_changes(question(), (0.5, 1.1)) if "GPUs" in one.name]
    assert gpus == ["8"]


def test_what_is_written_is_read_as_a_config_would_be():
    texts = ["gpus=32", "offload=true", "tp=open", "levels.spine.nodes=64"]
    change = written_change(texts, question())
    assert change.values == {
        "gpus": 32, "offload": True, "tp": "open", "cluster.levels.spine.nodes": 64,
    }  # fmt: skip


def test_the_page_has_a_bar_for_either_layout(answer):
    (figure,) = re.findall(r"data-figure=.*?>(.*?)</script>", answer["page"])
    kept, anew = json.loads(figure)["data"]
    assert (kept["name"], anew["name"]) == ("layout kept", "searched anew")
    assert "network x 2" in kept["y"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--set", "nic_speed=1"), "'nic_speed' is nothing of a layout, a cluster or its machine"),
        (("--set", "cluster.nic_speed=1"), "unknown number 'nic_speed'"),
        (("--set", "machine.hbm=1"), "no number 'hbm'"),
        (("--set", "nic_bytes_per_s"), "has no value; write it as"),
        (("--set", "nic_bytes_per_s=fast"), "--set nic_bytes_per_s needs a number, got 'fast'"),
        (("--set", "nic_bytes_per_s=5"), "5 GB/s are 5e+09"),
        (("--set", "gpus=1.5"), "--set gpus needs a positive whole number"),
        (("--set", "pipeline=2f2b"), "--set pipeline needs to be 'gpipe'"),
        (("--set", "tp=2", "--set", "tp=4"), "names 'tp' twice"),
        (("--set", "price_per_gpu_hour=-1"), "needs a price from 0"),
        (("--set", "tp=2", "--changes", "+10%"), "leave one out"),
        (("--target", "95"), "cannot read the target '95'"),
        (("--target", "95%", "--set", "tp=2"), "leave out it or --set"),
        (("--target", "95%", "--tokens", "1e9"), "leave out it or --tokens"),
        (("--machine", "h100"), "--machine and --cluster both say where to train"),
        (("--policy", "streaming"), "layouts are not searched by --policy"),
        (("--changes", "-200%"), "cannot read the change"),
        (("--tokens", "-1"), "--tokens needs to be greater than 0"),
        (("--checkpoint-s", "3"), "--checkpoint-s needs --tokens, or --price-per-gpu-hour"),
        (("--tp", "3"), "16 GPUs are not a multiple of tp 3 x pp 1 = 3"),
    ],
)
def test_wrong_input_is_one_message(options, said):
    message = error_of(*ASK, *options)
    assert said in message
    assert message.startswith("error: ") and message.count("\n") == 1


@pytest.mark.parametrize("command", ["plan", "whatif"])
def test_options_of_a_cluster_need_one(command):
    one = (command, "--model", "tiny", "--seq-len", 64)
    machine, cluster = (*one, "--machine", "cpu"), (*one, "--cluster", "h100_dgx")
    assert "--checkpoint-s needs --tokens" in error_of(*machine, "--checkpoint-s", 8)
    assert "--pp is of several GPUs: add --gpus N" in error_of(*machine, "--pp", 2)
    assert "this needs --machine (one device), or --cluster" in error_of(*one)
    assert "pp 2 are 2 GPUs, and there are 1" in error_of(*cluster, "--global-batch", 8, "--pp", 2)
    assert "needs --tokens-per-step, or --global-batch" in error_of(*cluster, "--gpus", 8)


def test_plan_tells_days_and_money_of_each_layout():
    charged = ("--tokens", 15e12, "--price-per-gpu-hour", 2.5)
    ask = ("plan", *STEP, *ON, "--keep", 2)
    layouts = call(*ask, *charged, "--json").json()["layouts"]
    for one in layouts:
        run_s = 15e12 / one["tokens_per_s"]
        assert one["bill"]["run_days"] == pytest.approx(run_s / 86400)
        assert one["bill"]["gpu_hours"] == pytest.approx(run_s / 3600 * 16)
        assert one["bill"]["money"] == pytest.approx(run_s / 3600 * 16 * 2.5)
    printed = call(*ask, *charged, "--checkpoint-s", 10, "--checkpoint-interval-s", 100).out
    assert "A run of 1.5e+13 tokens" in printed
    assert f"{layouts[0]['bill']['wall_days'] / 0.9:,.4g}" in printed and "90.0%" in printed
    assert "bill" not in call(*ask, "--json").json()["layouts"][0]

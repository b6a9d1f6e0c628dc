"""The commands that take a schedule take a cluster's, too, by what the file holds."""

import json
from pathlib import Path

import pytest

import twinstream as ts
from tests.front_door.command_line import call, error_of
from tests.helpers.sketches import op, sketch, tensor
from twinstream.hardware_profiles.clusters.loader import load_cluster, machine_of
from twinstream.measures.metrics import device_memory, matmul_dtype, summarize
from twinstream.models.flops import model_flops_per_sequence
from twinstream.models.spec import ModelSpec
from twinstream.schedule.document import Schedule
from twinstream.schedule.files import read_document, write_document
from twinstream.schedule.ops import Operand
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.tensors import DEVICE, Slot
from twinstream.schedule.timeline import PassSpans, Timeline
from twinstream.simulator.replay import simulate

TOKENS, GPUS = 8 * 4096, 16


@pytest.fixture(scope="module")
def schedule(cluster_file: Path) -> Schedule:
    return read_document(Schedule, cluster_file)


@pytest.fixture(scope="module")
def document(cluster_file: Path):
    return json.loads(cluster_file.read_text())


def written(document, path: Path, **changes) -> Path:
    path.write_text(json.dumps(document | changes))
    return path


def test_simulate_tells_the_step_of_the_simulator_and_writes_its_timeline(
    schedule, cluster_file, tmp_path
):
    path = tmp_path / "line.json"
    told = call("simulate", cluster_file, "--cluster", "h100_dgx", "-o", path, "--json").json()
    cluster = load_cluster("h100_dgx")
    expected = simulate(schedule, machine_of(cluster), cluster)
    assert told["step_time_s"] == expected.step_ns / 1e9
    assert told["tokens_per_s"] == pytest.approx(TOKENS / (expected.step_ns / 1e9))
    assert read_document(Timeline, path) == expected


def test_mfu_is_of_the_model_s_own_flops_and_all_gpus(schedule, cluster_file):
    told = call("simulate", cluster_file, "--json").json()
    flops = 8 * model_flops_per_sequence(ModelSpec.model_validate(schedule.model), 4096)
    assert told["num_gpus"] == GPUS
    assert told["mfu"] == pytest.approx(flops / told["step_time_s"] / GPUS / 989e12, rel=1e-3)
    assert matmul_dtype(schedule) == "bfloat16"


def test_people_are_told_the_classes_and_where_the_step_goes(cluster_file):
    printed = call("simulate", cluster_file).out
    assert "tiny on 16 GPUs of h100_dgx: pp 2 x dp 2 x cp 2 x tp 2" in printed
    rows = {line[:17].strip(): line.split() for line in printed.splitlines()}
    assert {"stage 0", "stage 1", "mean of ranks"} <= rows.keys()
    shares = [float(cell) for cell in rows["stage 0"][3:] if cell != "-"]
    assert sum(shares) == pytest.approx(100, abs=0.5)
    assert max(map(len, printed.splitlines())) <= 100


def test_a_straggler_slows_its_class_by_its_factor_and_the_step_with_it(cluster_file):
    before = call("simulate", cluster_file, "--json").json()
    after = call("simulate", cluster_file, "--straggler", "stage 1=2", "--json").json()
    busy = [[one["compute_ns"] for one in told["exposed"]] for told in (before, after)]
    # but for what collectives beside it take, which is as long as before
    assert busy[1][1] == pytest.approx(2 * busy[0][1], rel=0.06)
    assert busy[1][0] == pytest.approx(busy[0][0], rel=0.06)
    assert after["step_time_s"] > before["step_time_s"]
    assert after["stragglers"] == {"stage 1": 2.0}


def test_a_single_rank_may_be_the_straggler_and_the_others_wait_for_it(cluster_file, tmp_path):
    before = call("simulate", cluster_file, "--json").json()
    told = call("simulate", cluster_file, "--straggler", "rank 5=2", "--json").json()
    busy = {one["name"]: one["compute_ns"] for one in told["exposed"]}
    # Rank 5 of pp 2 x dp 2 x cp 2 x tp 2 is stage 0, dp 1, cp 0, tp 1.
    (slow,) = [name for name, ns in busy.items() if ns > 1.5 * min(busy.values())]
    assert slow == "stage 0, dp 1, cp 0, tp 1"
    assert sum(one["num_ranks"] for one in told["exposed"]) == GPUS
    beside = next(one for one in told["exposed"] if one["name"] == "stage 0, dp 1, cp 0, tp 0")
    assert beside["causes_ns"]["late_ranks"] > busy[slow] / 4
    assert told["step_time_s"] > before["step_time_s"]
    out = ("-o", tmp_path / "line.json")
    assert "would fit no file" in error_of(
        "simulate", cluster_file, "--straggler", "rank 5=2", *out
    )
    assert "rank N" in error_of("simulate", cluster_file, "--straggler", "rank 16=2")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("stage 7=2", "no class 'stage 7'"),
        ("stage 1", "write WHO=FACTOR"),
        ("=2", "write WHO=FACTOR"),
        ("stage 1=nan", "write WHO=FACTOR"),
        ("stage 1=0", "cannot take 0 times as long"),
        ("stage 1=inf", "cannot take inf times as long"),
    ],
)
def test_a_straggler_that_cannot_be_is_refused(cluster_file, text, said):
    assert said in error_of("simulate", cluster_file, "--straggler", text)


def test_verify_proves_it_or_names_what_is_wrong(cluster_file, document, tmp_path):
    told = call("verify", cluster_file)
    assert told.code == 0 and "none waits for ever" in told.out, told.err
    mine = json.loads(json.dumps(document))
    ops = mine["schedules"]["stage 1"]["ops"]
    sends = [at for at, op in enumerate(ops) if op.get("collective") == "recv"]
    ops[sends[0]]["sequence"] = 99
    broken = call("verify", written(mine, tmp_path / "broken.json"), "--json")
    assert broken.code == 2
    assert "SequenceWrong" in {one["kind"] for one in json.loads(broken.out)["violations"]}
    assert "SequenceWrong" in error_of("simulate", tmp_path / "broken.json")


def test_verify_asks_whether_the_stages_are_the_whole_step(document, tmp_path):
    # Half of the batch is left out of the document's claim, though what is there is safe.
    path = written(document, tmp_path / "other.json", global_batch=16)
    told = json.loads(call("verify", path, "--json").out)
    assert not told["ok"]
    assert all(one["kind"] not in ("Deadlock", "ClassUnsafe") for one in told["violations"])


def test_a_cluster_is_known_by_its_content_however_it_is_written(document, tmp_path):
    turned = dict(reversed(document.items()))
    path = written(turned, tmp_path / "turned.json")
    assert call("verify", path).code == 0
    del turned["order"]
    said = error_of("verify", written(turned, tmp_path / "damaged.json"))
    assert "not a valid schedule document: order" in said


def test_documents_in_the_place_of_others_are_named(cluster_file, files, schedule, tmp_path):
    line = tmp_path / "line.json"
    cluster = load_cluster("h100_dgx")
    write_document(simulate(schedule, machine_of(cluster), cluster), line)
    assert "is a timeline, not a schedule" in error_of("verify", line)
    said = error_of("trace", cluster_file, "--predicted", files.predicted)
    assert "is of one device, and the schedule of the classes" in said
    slow = ("--straggler", "stage 1=2")
    assert "leave it or --predicted out" in error_of(
        "trace", cluster_file, "--predicted", line, *slow
    )
    assert "--measured what `run -o` wrote" in error_of("report", cluster_file, "--measured", line)
    assert "--measured what `run -o` wrote" in error_of("trace", cluster_file, "--measured", line)
    assert "--cluster is of clusters" in error_of("simulate", files.schedule, "--cluster", "x")
    said = error_of("simulate", files.schedule, "--straggler", "a=2")
    assert "is no cluster's schedule" in said
    assert "is no cluster's schedule" in error_of("trace", files.schedule, "--cluster", "h100_dgx")


def test_of_a_cluster_that_is_not_shipped_the_profile_is_asked_for(document, tmp_path):
    machine = {"name": "mine", "content_hash": "0"}
    path = written(document, tmp_path / "mine.json", machine=machine)
    assert "give its profile: --cluster FILE.toml" in error_of("simulate", path)
    told = call("simulate", path, "--cluster", "h100_dgx", "--json")
    assert told.json()["simulated_on"] == "h100_dgx"


def test_memory_is_what_the_slots_take_and_the_reserve(schedule):
    cluster = load_cluster("h100_dgx")
    machine = machine_of(cluster)
    summary = summarize(schedule, simulate(schedule, machine, cluster), machine)
    for one in schedule.classes:
        arena = arena_bytes(schedule.of(one), DEVICE)
        reserve = round(machine.number("device_reserve_bytes"))
        assert sum(summary.memory_bytes[one.name].values()) == arena + reserve
    assert summary.device_bytes == round(machine.number("device_memory_bytes"))
    assert summary.missing_bytes == 0
    small = summary.model_copy(update={"device_bytes": 1000})
    fullest = sum(summary.memory_bytes[summary.fullest].values())
    assert small.missing_bytes == fullest - 1000


@pytest.mark.parametrize(("b_bytes", "rest"), [(768, 0), (2048, 512)])
def test_of_slots_that_overlap_the_fullest_moment_counts(b_bytes, rest):
    def step(name, *uses):
        operands = tuple(
            Operand(name=n, tensor=n, version=1, mode=mode, slot=n) for n, mode in uses
        )
        return op(name, "compute").model_copy(update={"operands": operands})

    slots = tuple(
        Slot(slot_id=name, tier=DEVICE, offset_bytes=offset, size_bytes=size)
        for name, offset, size in (("a", 0, 1024), ("b", 0, b_bytes), ("c", 1024, 512))
    )
    tensors = (tensor("a", 1024), tensor("b", 768, "gradient"), tensor("c", 512, "parameter"))
    # c is alive throughout, a in the first op, then b in a's place.
    ops = [
        step("first", ("a", "write"), ("c", "write")),
        step("second", ("b", "write")),
        step("third", ("b", "read"), ("c", "read")),
    ]
    spans = PassSpans(start_ns=(0, 10, 20), end_ns=(10, 20, 30))
    found = device_memory(sketch(ops, tensors=tensors, slots=slots), spans)
    assert found == {"activation": 1024, "parameter": 512, "arena": rest}


def test_python_asks_a_mesh_what_it_asks_a_device(cluster_file):
    schedule = read_document(Schedule, cluster_file)
    assert ts.verify(schedule) == [] == ts.conforms(schedule)
    cluster = load_cluster("h100_dgx")
    alike = simulate(schedule, machine_of(cluster), cluster)
    assert ts.simulate(schedule) == ts.simulate(schedule, cluster="h100_dgx") == alike
    slow = ts.simulate(schedule, stragglers={"stage 1": 1.5})
    assert slow.step_ns > alike.step_ns
    with pytest.raises(ts.TwinstreamError, match="a mesh has one for each stage"):
        ts.conforms(schedule, ts.Chain.model_construct())
    broken = schedule.model_copy(update={"order": schedule.order[::-1]})
    assert ts.verify(broken) != []
    with pytest.raises(ts.TwinstreamError, match="OrderWrong"):
        ts.simulate(broken)

"""One question has one answer, whoever is asked: one device is a mesh of one."""

import csv
from pathlib import Path
from typing import Any

import pytest

from tests.front_door.command_line import call, error_of
from tests.training.ranks.rank_runs import rank_options
from tests.training.ranks.test_layouts import prepared
from twinstream.hardware_profiles.clusters.loader import load_cluster, machine_of
from twinstream.hardware_profiles.loader import save_machine
from twinstream.schedule.document import RankSchedule, Schedule
from twinstream.schedule.files import read_document
from twinstream.schedule.proof.verify_layout import arena_bytes
from twinstream.schedule.tensors import DEVICE
from twinstream.study.front import query, sweep

STEP = ("--model", "tiny", "--seq-len", 256, "--tokens-per-step", 1024, "--chunk-tokens", 256)
MACHINE = ("--machine", "NODE")  # of h100_dgx, written to a file
ONE_GPU = ("--cluster", "h100_dgx", "--gpus", 1)
RECIPES: dict[str, tuple[object, ...]] = {
    "full": (),
    "lora": ("--lora", "r=8,alpha=16"),
    "frozen": ("--freeze", "model.layers.[0-1].*"),
    "offload": ("--device-mem", "1.56GiB"),
    "recompute": ("--recompute", "full"),
    "float32": ("--gradients", "float32", "--optimizer-state", "float32_master"),
    "eager": ("--kernels", "eager", "--attention", "eager", "--dtype", "float32"),
}


def planned(*question: object, folder: Path) -> tuple[dict[str, Any], Path]:
    file = folder / "plan.json"
    return call("plan", *at_node(question, folder), "--json", "-o", file).json(), file


def at_node(question: tuple[object, ...], folder: Path) -> list[object]:
    """The question with the profile of a node of h100_dgx."""
    node = folder / "node.toml"
    save_machine(machine_of(load_cluster("h100_dgx")), node)
    return [node if word == "NODE" else word for word in question]


def without_name(path: Path) -> dict[str, Any]:
    """A schedule, whatever its machine is called."""
    return read_document(RankSchedule, path).model_dump(exclude={"machine"})


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_gpu_of_a_cluster_is_the_machine(recipe: str, tmp_path: Path):
    more = RECIPES[recipe]
    _, by_machine = planned(*STEP, *MACHINE, *more, folder=tmp_path)
    expected = without_name(by_machine)
    _, by_cluster = planned(*STEP, *ONE_GPU, *more, folder=tmp_path)
    assert without_name(by_cluster) == expected
    in_sequences = (*STEP[:4], "--global-batch", 4, "--micro-batch", 1)
    _, by_sequences = planned(*in_sequences, *ONE_GPU, *more, folder=tmp_path)
    assert without_name(by_sequences) == expected


def test_whatif_and_sweeps_begin_with_the_plan(tmp_path: Path):
    told, _ = planned(*STEP, *MACHINE, folder=tmp_path)
    for where in (MACHINE, ONE_GPU):
        asked = at_node(("whatif", *STEP, *where, "--changes", "10%", "--json"), tmp_path)
        found = call(*asked).json()["base"]
        assert found["tokens_per_s"] == pytest.approx(told["tokens_per_s"], rel=1e-3)
    shared = 'model = "tiny"\nseq_len = 256\n'
    by_machine = 'machine = "node.toml"\ntokens_per_step = 1024\nchunk_tokens = 256\n'
    by_cluster = 'cluster = "h100_dgx"\ngpus = 1\nglobal_batch = 4\nmicro_batch = 1\n'
    for number, where in enumerate((by_machine, by_cluster)):
        config = tmp_path / f"{number}.toml"
        config.write_text(f"[fixed]\n{shared}{where}")
        folder = tmp_path / f"rows{number}"
        assert call("sweep", config, "-o", folder, "--jobs", 1).code == 0
        (row,) = csv.DictReader((folder / "rows.csv").read_text().splitlines())
        assert float(row["tokens_per_s"]) == pytest.approx(told["tokens_per_s"], rel=1e-3)


LAYOUT = ("--pp", 2, "--dp", 2, "--zero", 1, "--pipeline", "1f1b")


@pytest.mark.parametrize("where", [("--cluster", "h100_dgx"), ("--machine", "cpu")])
def test_a_layout_that_runs_has_one_prediction(where: tuple[str, str], tmp_path: Path):
    step = (*STEP, *where, *LAYOUT)
    by_ranks, file = planned(*step, "--ranks", 4, folder=tmp_path)
    expected = read_document(Schedule, file)
    by_gpus, file = planned(*step, "--gpus", 4, folder=tmp_path)
    found = read_document(Schedule, file)
    assert found.schedules == expected.schedules and found.order == expected.order
    if where[0] == "--machine":
        assert by_gpus["predicted"] == by_ranks["predicted"]
        return
    (layout,) = by_gpus["layouts"]
    assert layout["has_kernels"]
    assert layout["runs_here"] == by_ranks["runs_here"]
    assert layout["why_not_here"] == by_ranks["why_not_here"]
    assert layout["step_s"] == pytest.approx(by_ranks["predicted"]["step_time_s"], rel=1e-3)
    stages = expected.schedules.values()
    most = max(arena_bytes(one, DEVICE) + one.caps.outside_arena_bytes for one in stages)
    assert layout["memory_bytes"] == most


def test_training_and_planning_choose_the_same_layout(tmp_path: Path):
    options = rank_options(tmp_path, ranks=2, chunk_tokens=None, chunks_per_round=None)
    trained = prepared(options)
    machine = tmp_path / "here.toml"
    save_machine(trained.here.machine, machine)
    told, _ = planned(
        "--model", options.model, "--seq-len", options.seq_len, "--tokens-per-step", 512,
        "--machine", machine, "--ranks", 2, "--clips", folder=tmp_path,
    )  # fmt: skip
    chosen = trained.plan.layout
    assert (told["layout"]["pp"], told["layout"]["dp"]) == (chosen.pp, chosen.dp)
    # training packs documents: attention is another kernel, and lengths are fed
    assert told["predicted"]["step_time_s"] == pytest.approx(trained.plan.step_s, rel=0.15)


def test_chunks_of_a_layout_are_chosen_alike_by_a_search_and_for_ranks(tmp_path: Path):
    step = ("--model", "tiny", "--seq-len", 128, "--tokens-per-step", 2048, "--cluster", "h100_dgx")
    layout = ("--pp", 1, "--dp", 2, "--zero", 0, "--kernels", "triton")
    by_ranks, _ = planned(*step, *layout, "--ranks", 2, folder=tmp_path)
    by_gpus, _ = planned(*step, *layout, "--gpus", 2, folder=tmp_path)
    step_s = by_gpus["layouts"][0]["step_s"]
    assert step_s == pytest.approx(by_ranks["predicted"]["step_time_s"], rel=1e-3)
    assert by_ranks["workload"]["chunk_tokens"] > 128


def test_half_of_the_host_is_the_same_for_ranks_and_for_gpus(tmp_path: Path):
    step = (*STEP, "--machine", "cpu", "--host-mem", "50%")
    caps = [
        [one.caps for one in read_document(Schedule, file).schedules.values()]
        for count in ("--ranks", "--gpus")
        for _, file in [planned(*step, count, 2, folder=tmp_path)]
    ]
    assert caps[0] == caps[1]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--gpus", 2, "--tp", 2, "--recompute", "attention"), "and not for this: tp runs here"),
        (("--gpus", 1, "--zero", 1), "--zero"),
        (("--gpus", 1, "--pipeline", "gpipe"), "--pipeline"),
        (("--gpus", 1, "--keep", 2), "--keep"),
        (("--gpus", 2, "--kernels", "bogus"), "bogus"),
    ],
)
def test_what_cannot_be_meant_is_refused(flags: tuple[object, ...], said: str):
    assert said in error_of("plan", *STEP, "--cluster", "h100_dgx", *flags)


def test_what_does_not_run_says_why_and_run_says_the_same(tmp_path: Path):
    split = (*STEP, "--cluster", "h100_dgx", "--gpus", 2, "--tp", 2)
    told, file = planned(*split, folder=tmp_path)
    (layout, *_) = told["layouts"]
    assert not layout["runs_here"] and "kernel set megatron is priced" in layout["why_not_here"]
    assert layout["recipe"]["kernels"]["vector"] == "megatron"
    assert "kernel set megatron is priced" in error_of("run", file)
    named = error_of("plan", *split, "--kernels", "triton")
    assert "the kernel set triton does not compute this layout: tp runs here" in named


def test_what_runs_here_runs(tmp_path: Path):
    told, file = planned(*STEP, "--machine", "cpu", folder=tmp_path)
    assert told["runs_here"] and told["why_not_here"] is None
    assert call("run", file, "--steps", 1).code == 0
    on_host = (*STEP, "--machine", "cpu", "--policy", "optimizer_offload")
    told, file = planned(*on_host, folder=tmp_path)
    assert told["runs_here"] and call("run", file, "--steps", 1).code == 0
    told, _ = planned(*STEP, *MACHINE, folder=tmp_path)
    assert told["runs_here"] or told["why_not_here"]


def test_ranks_are_planned_alike_by_plan_whatif_sweep_and_python(tmp_path: Path):
    told, file = planned(*STEP, "--machine", "cpu", "--gpus", 2, folder=tmp_path)
    expected = told["predicted"]["step_time_s"]
    values = {"model": "tiny", "machine": "cpu", "ranks": 2, "seq_len": 256}
    values |= {"tokens_per_step": 1024, "chunk_tokens": 256}
    answer = query(**values).answer()
    assert answer.step_s == expected
    assert answer.schedule == read_document(Schedule, file)
    varied = ("whatif", *STEP, "--machine", "cpu", "--gpus", 2, "--set", "hbm_bytes_per_s=1e9")
    found = call(*varied, "--json").json()
    assert found["base"]["step_s"] == expected
    (changed,) = found["answers"]
    assert changed["anew"]["step_s"] > expected
    config = {"fixed": values, "axes": {"dp": [1, 2]}}
    rows = sweep(config, tmp_path / "rows", num_jobs=1).rows
    assert min(float(row["step_s"]) for row in rows) == pytest.approx(expected, rel=1e-6)
    assert {row["layout.pp"] for row in rows} == {"1", "2"}
    fixed = query(**values, pp=2)
    kept = fixed.changed({"ranks": 4, "pp": "open"}).kept(answer)
    assert kept.layout is not None and kept.layout.num_gpus == 4

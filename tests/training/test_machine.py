"""The machine that a run finds: a known GPU's attention is timed once, and kept for later runs."""

import pytest
import torch

import twinstream.api
from tests.training.small_runs import write_rows
from twinstream.executor.memory import host_limits
from twinstream.executor.memory.host_limits import HostLimits
from twinstream.executor.probe import cpu, device, known_check, known_gpu
from twinstream.hardware_profiles.loader import load_machine
from twinstream.hardware_profiles.schema import AttentionChoice, Machine, Number
from twinstream.models.kernel_costs import attention_libraries
from twinstream.models.presets import load_preset
from twinstream.models.recipes.recipe import KernelChoice
from twinstream.planner.request import caps_of
from twinstream.schedule.errors import TwinstreamError
from twinstream.training import machine as training_machine
from twinstream.training.options import TrainOptions
from twinstream.training.planning import recipe_of
from twinstream.training.trainer import Trainer

GIB = 2**30
OPTIONS = TrainOptions(model="8b", data=("d",), output="o")


def naming(machine: Machine, attention: str) -> Machine:
    choice = AttentionChoice(name=attention, kind="measured", source="a test")
    return machine.model_copy(update={"attention": choice})


@pytest.fixture
def measured(monkeypatch, tmp_path) -> list[str]:
    """What is measured of a GPU that is not here, in order; its cache is a folder of the test."""
    found: list[str] = []

    def with_attention(machine, tell):
        found.append(f"attention of {machine.name}")
        return naming(machine, "sdpa_flash")

    def probed_machine(tell):
        found.append("all")
        return naming(load_machine("h200"), "sdpa_flash")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(known_gpu, "with_attention", with_attention)
    monkeypatch.setattr(known_check, "checked_machine", lambda machine, heads, tell: machine)
    monkeypatch.setattr(device, "probed_machine", probed_machine)
    return found


def machine_of(folder, dtype="bfloat16", options=OPTIONS):
    return training_machine._machine(options, folder, "cuda", dtype, lambda line: None)


def test_a_known_gpus_attention_is_timed_at_the_first_run_and_kept(measured, tmp_path, monkeypatch):
    first = machine_of(tmp_path)
    assert first == naming(load_machine("h100"), "sdpa_flash")
    assert machine_of(tmp_path / "another run") == first
    assert measured == ["attention of h100"]
    (kept,) = (tmp_path / "cache").rglob("*.toml")
    assert kept.name.startswith("nvidia-h100-80gb-hbm3-")
    whole, told = kept.read_text(), list[str]()
    kept.write_text(whole.replace("9", "8", 1))  # still a profile, with another number
    assert training_machine._machine(OPTIONS, tmp_path, "cuda", "bfloat16", told.append) == first
    assert kept.read_text() == whole
    assert told == [f"{kept} is damaged, or of another version of twinstream: measuring anew"]
    monkeypatch.setattr(attention_libraries, "version", lambda name: "4.0")
    monkeypatch.setattr(training_machine, "version", lambda name: "4.0")
    machine_of(tmp_path)  # a library has been installed
    assert measured == 3 * ["attention of h100"] and machine_of(tmp_path) == first


def test_a_gpu_without_a_profile_is_measured_once(measured, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Another GPU")
    assert machine_of(tmp_path) == machine_of(tmp_path)
    assert measured == ["all"]


def test_nothing_is_timed_where_nothing_can_be_chosen(measured, tmp_path):
    assert machine_of(tmp_path, "float32") == load_machine("h100")
    named = OPTIONS.model_copy(update={"machine": "h200"})
    assert machine_of(tmp_path, options=named) == load_machine("h200")
    assert measured == []


def test_a_machine_that_is_not_here_has_its_own_memory_and_kernels(tmp_path):
    named = OPTIONS.model_copy(update={"machine": "rtx4090", "host_mem": "100GiB"})
    here = training_machine.detect_machine(named, tmp_path, "cpu", "bfloat16", lambda line: None)
    assert not here.is_here and (here.device_mem, here.host_mem) == (None, "100GiB")
    recipe = recipe_of(named, here, load_preset("8b"))
    assert recipe.kernels == KernelChoice(vector="triton", attention="sdpa_flash")
    caps = caps_of(here.machine, here.device_mem, None)
    assert (caps.device_bytes, caps.host_bytes) == (25_757_220_864, int(0.8 * 128 * 2**30))


def test_where_none_is_right_the_next_run_tries_again(measured, tmp_path, monkeypatch):
    def none(machine, tell):
        measured.append("in vain")
        return machine

    monkeypatch.setattr(known_gpu, "with_attention", none)
    assert machine_of(tmp_path) == machine_of(tmp_path) == load_machine("h100")
    assert measured == 2 * ["in vain"]


def test_a_cache_that_cannot_be_written_costs_only_time(measured, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert machine_of(tmp_path).attention is not None
    assert machine_of(tmp_path).attention is not None
    assert len(measured) == 2


def test_a_cpu_is_measured_once_and_anew_for_another_dtype(monkeypatch, tmp_path):
    found: list[list[str]] = []

    def probe(dtypes):
        found.append(list(dtypes))
        return load_machine("cpu")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(twinstream.api, "probe", probe)
    pace = [1.0]
    monkeypatch.setattr(cpu, "cpu_pace", lambda machine: pace[0])
    machines = [
        training_machine._machine(OPTIONS, tmp_path / str(run), "cpu", dtype, lambda line: None)
        for run, dtype in enumerate(("float32", "float32", "bfloat16", "float32"))
    ]
    assert found == [["float32"], ["bfloat16"]]
    assert machines == 4 * [load_machine("cpu")]
    pace[0] = 2.0  # it was busy when it was measured
    training_machine._machine(OPTIONS, tmp_path / "later", "cpu", "float32", lambda line: None)
    assert found[2:] == [["float32"]]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"data": ("nothing.jsonl",)}, "nothing.jsonl"),
        ({"optim": "adamm"}, "adamm"),
        ({"lora": "r=0"}, "r"),
        ({"base": "nf4"}, "train adapters"),
    ],
)
def test_files_and_options_are_looked_at_before_the_machine_is_measured(
    options, told, monkeypatch, tmp_path
):
    def probe(dtypes):
        raise AssertionError("measured before the options were looked at")

    rows = write_rows(tmp_path / "rows.jsonl", 20)
    given = {"model": "tiny", "data": (str(rows),), "output": tmp_path / "run", "seq_len": 64}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(twinstream.api, "probe", probe)
    with pytest.raises(TwinstreamError, match=told):
        Trainer(TrainOptions.of(given | options, "")).prepare()
    with pytest.raises(AssertionError):
        Trainer(TrainOptions.of(given, "")).prepare()


def test_caps_of_one_memory_are_shares_of_what_is_free(monkeypatch):
    free = HostLimits(None, None, 100 * GIB)
    monkeypatch.setattr(host_limits, "host_limits", lambda: free)
    monkeypatch.setattr(training_machine, "_free_on_gpu", lambda: 119 * GIB)
    two = load_machine("rtx5090")
    found = training_machine._free(OPTIONS, two, "cuda", None)
    assert found[1] == 80 * GIB
    numbers = {
        name: Number(value=x * 2.0**30, kind="assumed", source="a test")
        for name, x in {"device_memory_bytes": 90, "host_memory_bytes": 29,
                        "unified_memory_bytes": 119}.items()
    }  # fmt: skip
    one = two.model_copy(update=numbers)
    assert training_machine._free(OPTIONS, one, "cuda", None) == (80 * GIB - 2**28, 2**28)


@pytest.mark.parametrize(
    ("num_ranks", "now", "each"),
    [(1, GIB // 4, 0), (2, GIB // 4, GIB // 4), (2, 9 * GIB, 400 << 20)],
)
def test_default_caps_of_a_cpu_leave_room_for_its_processes(num_ranks, now, each, monkeypatch):
    """Which are no larger where this one is; caps that are given are taken as they are."""
    monkeypatch.setattr(host_limits, "host_limits", lambda: HostLimits(None, None, 5 * GIB))
    monkeypatch.setattr(host_limits, "process_bytes", lambda: (now, now))
    here, ranks = load_machine("cpu"), {"ranks": num_ranks} if num_ranks > 1 else {}
    free = training_machine._free(OPTIONS.model_copy(update=ranks), here, "cpu", None)
    of_ranks = num_ranks * (160 * 2**20 + each)
    assert sum(free) == int(0.8 * (5 * GIB - of_ranks))
    given = OPTIONS.model_copy(update={"device_mem": "3GiB", "host_mem": "9GiB"})
    assert training_machine._free(given, here, "cpu", None) == ("3GiB", "9GiB")

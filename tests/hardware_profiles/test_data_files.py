"""Every shipped profile, number by number."""

import math
import re

import pytest

from twinstream.hardware_profiles.cost import copy_alone_ns, cost_alone_ns
from twinstream.hardware_profiles.loader import load_machine, machine_names
from twinstream.hardware_profiles.schema import NARROW_PEAKS, NUMBER_FIELDS, RATE_FIELDS, Number
from twinstream.schedule.cost import Work

MIB = 2**20
COMMON_FIELDS = tuple(field for field in NUMBER_FIELDS if field not in NARROW_PEAKS)
# bf16 dense TFLOP/s, PCIe one way GB/s, host DRAM GB/s, HBM GB/s, device memory MiB
FIGURES = {
    "h100": (989, 64, 307, 3350, 81559),
    "h200_datasheet": (989, 64, 307, 4800, 143771),
    "a100": (312, 32, 188, 2039, 81920),
    "rtx5090": (209.5, 64, 83, 1792, 32607),
    "rtx3090": (71, 32, 51, 936, 24576),
    "h100_datasheet": (989, 64, 307, 3350, 81559),
    "rtx3090_datasheet": (71, 32, 51, 936, 24576),
    "b200": (2250, 64, 358, 7672, 183359),
    "b200_training": (2250, 64, 358, 7672, 183359),
    "b300": (2250, 64, 358, 8000, 274658.203125),
    "gb200": (2500, 225, 256, 8000, 177383.4228515625),
    "gb300": (2500, 225, 256, 8000, 274658.203125),
    "gh200": (990, 450, 384, 4000, 97871),
    "rtx4090": (165.2, 32, 83, 1008, 24564),
    "mi300x": (1307.4, 64, 460, 5300, 196608),
    "mi325x": (1307.4, 64, 460, 6000, 262144),
    "a100_training": (312, 32, 188, 2039, 81920),
    "h100_training": (989, 64, 307, 3350, 81559),
}
FITTED = ("h100", "rtx3090")
DATASHEET = ("h100_datasheet", "rtx3090_datasheet")
BORROWED = ("a100", "b200", "gh200", "h200_datasheet", "mi300x", "mi325x",
            "rtx4090", "rtx5090")  # fmt: skip
TRAINING = ("a100_training", "h100_training")  # fitted to steps of clusters
PROBED = ("h200",)
SUSTAINED = ("b200_training", "b300", "gb200", "gb300")  # of whose steps only that is known
POOLS = ("gb10", "strix_halo")
UNITS = ("matmul", "attention_forward", "attention_backward", "rms_norm", "adamw", "any_other")


def test_what_was_probed_says_so_and_the_rest_is_its_base():
    probed, base = load_machine("h200"), load_machine("h200_datasheet")
    assert probed.peak_bf16_flop_per_s == base.peak_bf16_flop_per_s
    for field in ("pcie_h2d_bytes_per_s", "launch_latency_ns", "device_reserve_bytes"):
        number = getattr(probed, field)
        assert number.kind == "measured" and "probed 2026-11-27 on NVIDIA H200" in number.source
    backward = probed.efficiency["attention_backward/cudnn_frontend"]
    assert backward.kind == "measured" and backward.diagonal == pytest.approx(0.98, abs=0.01)
    assert probed.efficiency["host_adamw"] == base.efficiency["host_adamw"]


def test_the_shipped_machines_are_the_documented_ones():
    known = (
        *FITTED,
        *DATASHEET,
        *BORROWED,
        *TRAINING,
        *SUSTAINED,
        *PROBED,
        *POOLS,
        "cpu",
    )
    assert machine_names() == tuple(sorted(known))


@pytest.mark.parametrize("name", machine_names())
def test_every_number_of_a_shipped_profile_has_a_kind_and_a_source(name):
    machine = load_machine(name)
    assert machine.name == name
    assert machine.description
    for field in NUMBER_FIELDS:
        number = getattr(machine, field)
        if field in NARROW_PEAKS and number is None:
            continue
        assert isinstance(number, Number), f"{name} lacks {field}"
        fitted = ("fitted",) if name in (*FITTED, *TRAINING, *SUSTAINED) else ()
        assert number.kind in ("datasheet", "measured", "assumed", *fitted)
        assert len(number.source) > 10
    for curve in machine.efficiency.values():
        assert curve.kind in ("assumed", "measured", *fitted)
        assert len(curve.source) > 10


@pytest.mark.parametrize("name", FITTED)
def test_a_fitted_profile_says_to_what_and_how_well(name):
    machine = load_machine(name)
    fitted = {key: curve for key, curve in machine.efficiency.items() if curve.kind == "fitted"}
    assert {"sustained", "attention_forward", "attention_backward"} <= set(fitted)
    for curve in fitted.values():
        assert "fitted to 14 measured times of ml_dataflow_measured.csv on 20" in curve.source
        assert "mean residual" in curve.source
        assert f"in {name}_datasheet" in curve.source
    datasheet = load_machine(f"{name}_datasheet")
    for field in NUMBER_FIELDS:
        number = getattr(machine, field)
        assert number == getattr(datasheet, field) or number.kind == "fitted"


@pytest.mark.parametrize("name", TRAINING)
def test_constants_of_training_steps_say_which_tables_they_are_fitted_to(name):
    machine, base = load_machine(name), load_machine(name.removesuffix("_training"))
    changed = {key for key, curve in machine.efficiency.items() if curve != base.curve(key)}
    assert {"sustained", "matmul", "attention_forward", "vector"} <= changed
    for key in changed:
        assert machine.efficiency[key].kind == "fitted"
        assert re.search(r"fitted to \d+ steps of .*\.csv on 20", machine.efficiency[key].source)
    assert machine.launch_latency_ns.kind == "fitted"


@pytest.mark.parametrize("name", SUSTAINED)
def test_a_rate_that_power_sustains_says_which_steps_it_is_fitted_to(name):
    machine = load_machine(name)
    base = load_machine("b200")
    sustained = machine.efficiency["sustained"]
    assert sustained.max < base.efficiency["sustained"].max
    assert re.search(r"not to .*experts|no dense step", sustained.source)
    changed = {
        key for key, curve in machine.efficiency.items() if curve != base.efficiency.get(key)
    }
    assert changed <= {"sustained", "matmul/fp4"}


@pytest.mark.parametrize("name", BORROWED)
def test_a_borrowed_efficiency_says_from_whom_and_how_far_off_borrowing_was(name):
    curves = load_machine(name).efficiency
    for key in ("sustained", "matmul", "attention_forward", "attention_backward", "rms_norm"):
        assert curves[key].kind == "assumed"
        assert re.match(r"borrowed from (h100|rtx3090) \(", curves[key].source)
        assert re.search(r"off by [0-9.]+ % .* in a test", curves[key].source)


@pytest.mark.parametrize("name", FIGURES)
def test_a_gpu_carries_the_published_figures(name):
    bf16_tflops, pcie_gb, dram_gb, hbm_gb, memory_mib = FIGURES[name]
    machine = load_machine(name)
    assert machine.device == "cuda"
    assert machine.number("peak_bf16_flop_per_s") == bf16_tflops * 1e12
    assert machine.number("pcie_h2d_bytes_per_s") == pcie_gb * 1e9
    assert machine.number("pcie_d2h_bytes_per_s") == pcie_gb * 1e9
    assert machine.number("pcie_duplex_bytes_per_s") == 2 * pcie_gb * 1e9
    assert machine.number("host_dram_bytes_per_s") == dram_gb * 1e9
    assert machine.number("hbm_bytes_per_s") == hbm_gb * 1e9
    assert machine.number("device_memory_bytes") == memory_mib * MIB


@pytest.mark.parametrize(
    ("name", "fp8_tflops", "fp4_tflops"),
    [("h100", 1979, None), ("h100_datasheet", 1979, None), ("h200", 1979, None),
     ("gh200", 1979, None), ("b200", 4500, 9000), ("gb200", 5000, 10000),
     ("b300", 4500, 13500), ("gb300", 5000, 15000), ("a100", None, None)],
)  # fmt: skip
def test_peaks_of_narrow_dtypes_are_the_datasheets_without_sparsity(name, fp8_tflops, fp4_tflops):
    machine = load_machine(name)
    for field, tflops in zip(NARROW_PEAKS, (fp8_tflops, fp4_tflops), strict=True):
        stated = getattr(machine, field)
        assert (stated and (stated.value, stated.kind)) == (tflops and (tflops * 1e12, "datasheet"))


@pytest.mark.parametrize(("name", "low_gb", "high_gb"), [("h100", 51, 53), ("rtx3090", 23, 25)])
def test_the_usable_link_is_what_recorded_runs_saw(name, low_gb, high_gb):
    machine = load_machine(name)
    for field in ("pcie_h2d_bytes_per_s", "pcie_d2h_bytes_per_s"):
        assert low_gb <= machine.rate(field) / 1e9 <= high_gb
    assert 2 * low_gb <= machine.rate("pcie_duplex_bytes_per_s") / 1e9 <= 2 * high_gb


@pytest.mark.parametrize("name", machine_names())
def test_a_shipped_profile_can_price_every_unit_and_copy(name):
    machine = load_machine(name)
    for field in (field for field in RATE_FIELDS if field in COMMON_FIELDS):
        assert 0 < machine.rate(field) < math.inf
    for dtype in ("bfloat16", "float32"):
        works = [
            Work(unit=unit, shape=(), flops=10**9, hbm_bytes=10**6, launches=1, dtype=dtype)
            for unit in UNITS
        ]
        assert 0 < cost_alone_ns(works, machine) < math.inf
    assert 0 < copy_alone_ns(2**20, "h2d", machine) < math.inf
    assert 0 < copy_alone_ns(2**20, "d2h", machine) < math.inf


def test_the_cpu_profile_is_assumed_throughout_and_points_to_the_probe():
    machine = load_machine("cpu")
    assert machine.device == "cpu"
    assert {getattr(machine, field).kind for field in COMMON_FIELDS} == {"assumed"}
    assert "twinstream probe" in machine.description


def test_a_recorded_layer_is_priced_within_a_tenth():
    # The profiled H100 run of 8B: weight gradients of a layer, 16,384 tokens, take 10.65 ms.
    tokens, d, kv, ffn = 16_384, 4096, 1024, 14_336
    outputs = [(d, d)] * 2 + [(kv, d)] * 2 + [(ffn, d)] * 3
    works = [
        Work(
            unit="matmul",
            shape=(m, n, tokens),
            flops=2 * tokens * m * n,
            hbm_bytes=2 * (tokens * (m + n) + 2 * m * n),
            launches=1,
        )
        for m, n in outputs
    ]
    assert cost_alone_ns(works, load_machine("h100")) / 1e6 == pytest.approx(10.65, rel=0.1)

"""What a machine is: its rates, what it refuses, its hash."""

import math

import pytest
from pydantic import ValidationError

from tests.hardware_profiles.machines import curve, number, toy_machine
from twinstream.hardware_profiles.errors import MissingNumberError
from twinstream.hardware_profiles.loader import machine_names
from twinstream.hardware_profiles.schema import ComputeCapability, Efficiency, Machine, Number


def test_the_usable_rate_of_a_link_is_nominal_times_its_efficiency():
    assert toy_machine().rate("pcie_h2d_bytes_per_s") == pytest.approx(8e9)
    assert toy_machine().number("pcie_h2d_bytes_per_s") == 10e9


def test_a_peak_has_no_efficiency_of_its_own():
    assert toy_machine().rate("peak_bf16_flop_per_s") == 100e12


def test_an_unconstrained_rate_is_infinite_even_without_an_efficiency():
    update = {"hbm_bytes_per_s": number(None), "efficiency": {}}
    assert toy_machine().model_copy(update=update).rate("hbm_bytes_per_s") == math.inf


def test_a_missing_number_names_machine_field_alternatives_and_the_line_to_add():
    machine = Machine(name="bare", description="", device="cuda")
    with pytest.raises(MissingNumberError) as caught:
        machine.rate("hbm_bytes_per_s")
    assert caught.value.field == "hbm_bytes_per_s"
    assert caught.value.machine == "bare"
    message = str(caught.value)
    assert "machine 'bare' has no hbm_bytes_per_s" in message
    assert f"Shipped profiles that state it: {', '.join(machine_names())}." in message
    assert 'hbm_bytes_per_s = { value = ..., kind = "measured", source = "..." }' in message


def test_a_missing_link_efficiency_is_an_error_not_one():
    machine = toy_machine().model_copy(update={"efficiency": {}})
    with pytest.raises(MissingNumberError) as caught:
        machine.rate("pcie_d2h_bytes_per_s")
    assert "has no efficiency.d2h" in str(caught.value)
    assert caught.value.stated_by == machine_names()


def test_a_number_that_no_shipped_profile_states_says_so():
    machine = Machine(name="bare", description="", device="cuda")
    with pytest.raises(MissingNumberError, match="that state it: none"):
        machine.curve("matmul/head_dim_7")


@pytest.mark.parametrize(
    ("field", "table", "code"),
    [
        ("hbm_bytes_per_s", {"value": -1.0}, "value_negative"),
        ("hbm_bytes_per_s", {"value": 0.0}, "value_zero"),
        ("pcie_h2d_bytes_per_s", {"value": 128.0}, "value_too_small"),
        ("hbm_bytes_per_s", {"value": 1e30}, "value_beyond"),
        ("device_memory_bytes", {"value": 48.0}, "value_too_small"),
        ("hbm_bytes_per_s", {"value": math.inf}, "finite_number"),
        ("hbm_bytes_per_s", {"value": True}, "float_type"),
        ("hbm_bytes_per_s", {"value": "1e12"}, "float_type"),
        ("hbm_bytes_per_s", {}, "value_missing"),
        ("hbm_bytes_per_s", {"value": 1.0, "source": " "}, "string_pattern_mismatch"),
        ("hbm_bytes_per_s", {"value": 1.0, "kind": "guess"}, "literal_error"),
        ("hbm_bytes_per_s", {"value": 1.0, "kind": "unconstrained"}, "value_of_unconstrained"),
        ("launch_latency_ns", {"kind": "unconstrained"}, "cost_unconstrained"),
        ("launch_latency_ns", {"value": -1.0}, "value_negative"),
        ("hbm_gb_per_s", {"value": 1.0}, "extra_forbidden"),
    ],
)
def test_a_wrong_number_is_refused(field, table, code):
    document = {"name": "m", "description": "", "device": "cuda"}
    with pytest.raises(ValidationError) as caught:
        Machine.model_validate({**document, field: {"kind": "assumed", "source": "s", **table}})
    assert [fault["type"] for fault in caught.value.errors()] == [code]


def test_a_latency_may_be_zero():
    update = {"launch_latency_ns": number(0), "device_reserve_bytes": number(0)}
    machine = Machine.model_validate({**toy_machine().model_dump(), **update})
    assert machine.rate("launch_latency_ns") == 0


@pytest.mark.parametrize(
    ("key", "of", "implementation", "code"),
    [
        ("matmul", "bytes", None, "curve_of_compute"),
        ("attention_forward/float32", "bytes", None, "curve_of_compute"),
        ("h2d", "flops", None, "curve_of_link"),
        ("matmul/fp32", "flops", None, "curve_key"),
        ("Matmul", "flops", None, "curve_key"),
        ("sustained", "bytes", None, "curve_of_peak"),
        ("attention_forward/head_dim_64/flash3", "flops", None, "curve_key"),
        ("attention_forward/bfloat16/flash3", "flops", None, "curve_key"),
        ("attention_forward/flash9", "flops", None, "curve_key"),
        ("matmul/flash3", "flops", None, "curve_key"),
        ("attention_forward/flash3", "flops", "flash3", "curve_implementation"),
        ("matmul", "flops", "flash3", "curve_implementation"),
        ("attention_forward", "flops", "flash9", "implementation_unknown"),
    ],
)
def test_a_curve_that_does_not_fit_its_key_is_refused(key, of, implementation, code):
    wrong = curve(1, 0, of).model_copy(update={"implementation": implementation})
    with pytest.raises(ValidationError) as caught:
        Machine(name="m", description="", device="cuda", efficiency={key: wrong})
    assert [fault["type"] for fault in caught.value.errors()] == [code]


def test_only_matmul_and_attention_have_an_inner_loop():
    deep = curve(1, 0, "bytes").model_copy(update={"half_depth": 64.0})
    with pytest.raises(ValidationError, match="'rms_norm' has no inner loop"):
        Machine(name="m", description="", device="cuda", efficiency={"rms_norm": deep})


def test_only_attention_has_a_causal_mask():
    uneven = curve(1, 0, "flops").model_copy(update={"diagonal": 1.0})
    with pytest.raises(ValidationError, match="'matmul' has no causal mask"):
        Machine(name="m", description="", device="cuda", efficiency={"matmul": uneven})


@pytest.mark.parametrize(("max_", "half"), [(0, 0), (1.6, 0), (1, -1), (math.nan, 0)])
def test_a_curve_out_of_range_is_refused(max_, half):
    with pytest.raises(ValidationError):
        Efficiency(max=max_, half=half, of="bytes", kind="assumed", source="s")


def test_the_hash_is_stable_and_changes_with_every_number_and_source():
    machine = toy_machine()
    assert machine.content_hash == toy_machine().content_hash
    assert len(machine.content_hash) == 16
    assert int(machine.content_hash, 16) >= 0
    faster = machine.model_copy(update={"hbm_bytes_per_s": number(2e12)})
    retold = machine.model_copy(
        update={"hbm_bytes_per_s": Number(value=1e12, kind="assumed", source="elsewhere")}
    )
    hashes = {one.content_hash for one in (machine, faster, retold)}
    assert len(hashes) == 3


def test_the_hash_does_not_depend_on_how_a_number_is_written():
    one = Machine.model_validate(toy_machine().model_dump())
    table = {"value": 1_000_000_000_000, "kind": "assumed", "source": "test"}
    other = Machine.model_validate({**toy_machine().model_dump(), "hbm_bytes_per_s": table})
    curves = dict(reversed(one.efficiency.items()))
    turned = one.model_copy(update={"efficiency": curves})
    assert one.content_hash == other.content_hash == turned.content_hash


def test_the_hash_is_of_what_plans_follow_from():
    stated = ComputeCapability(value="12.0", kind="assumed", source="test")
    machine = toy_machine()
    assert stated.major == 12
    assert machine.model_copy(update={"compute_capability": stated}).content_hash == (
        machine.content_hash
    )
    narrow = machine.model_copy(update={"peak_fp8_flop_per_s": number(2e14)})
    assert narrow.content_hash == machine.content_hash


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("peak_bf16_flop_per_s", 989.0, "989 is so many FLOPs a second; 989 TFLOP/s are 9.89e+14"),
        ("pcie_h2d_bytes_per_s", 64.0, "64 is so many bytes a second; 64 GB/s are 6.4e+10"),
        ("device_memory_bytes", 48.0, "48 is so many bytes; 48 GiB are 51539607552"),
        ("hbm_bytes_per_s", 1e30, "1e+30 bytes a second is no limit; write inf"),
    ],
)
def test_a_slip_in_the_unit_is_told_what_was_meant(field, value, told):
    with pytest.raises(ValidationError) as caught:
        toy_machine().model_validate(
            toy_machine().model_dump() | {field: number(value).model_dump()}
        )
    assert told in str(caught.value)


def test_one_memory_is_not_counted_twice():
    gib = 2.0**30
    shares = {"device_memory_bytes": number(90 * gib), "host_memory_bytes": number(29 * gib)}
    pool = {"unified_memory_bytes": number(119 * gib)}
    document = toy_machine().model_dump()
    assert Machine.model_validate(document | shares | pool).number("host_memory_bytes") == 29 * gib
    twice = shares | {"host_memory_bytes": number(119 * gib)}
    with pytest.raises(ValidationError, match="together, of one memory of 127775277056: divide it"):
        Machine.model_validate(document | twice | pool)
    with pytest.raises(ValidationError, match="host_memory_bytes is unknown: of one memory, state"):
        Machine.model_validate(document | shares | {"host_memory_bytes": None} | pool)

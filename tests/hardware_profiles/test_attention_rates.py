"""Attention is priced by its implementation: by its own rate, or by another's and a ratio."""

import pytest

from tests.hardware_profiles.machines import curve, toy_machine
from twinstream.hardware_profiles.attention_rates import IMPLEMENTATIONS
from twinstream.hardware_profiles.calibration.parameters import declared_parameters, prepared
from twinstream.hardware_profiles.cost import work_time
from twinstream.hardware_profiles.curve_choice import curve_for, efficiency_keys, with_own_rates
from twinstream.hardware_profiles.loader import load_machine_text
from twinstream.hardware_profiles.profile_files import profile_toml
from twinstream.hardware_profiles.schema import AttentionChoice, ComputeCapability, Machine
from twinstream.models.kernel_costs.attention_limits import attention_names
from twinstream.schedule.cost import Work

HOPPER = ComputeCapability(value="9.0", kind="assumed", source="test")


def attention(implementation, unit="attention_forward", head_dim=128, dtype="bfloat16"):
    return Work(
        unit=unit, shape=(8192, 8192, 32, head_dim, 1), flops=10**9, hbm_bytes=0, launches=0,
        dtype=dtype, implementation=implementation,
    )  # fmt: skip


def with_curves(curves, **changes) -> Machine:
    """The toy machine, whose own curves of attention are left out."""
    base = toy_machine()
    kept = {k: c for k, c in base.efficiency.items() if not k.startswith("attention")}
    return base.model_copy(update={"efficiency": kept | curves, **changes})


def of(implementation, max_=0.4):
    return curve(max_, 0, "flops").model_copy(update={"implementation": implementation})


def test_the_names_are_those_of_the_registry():
    assert set(IMPLEMENTATIONS) == set(attention_names())


def test_keys_name_the_implementation_then_the_head_dim_then_the_dtype():
    assert efficiency_keys(attention("flash3", head_dim=64)) == (
        "attention_forward/flash3/head_dim_64/bfloat16", "attention_forward/flash3/bfloat16",
        "attention_forward/flash3/head_dim_64", "attention_forward/flash3",
        "attention_forward/head_dim_64/bfloat16", "attention_forward/bfloat16",
        "attention_forward/head_dim_64", "attention_forward",
    )  # fmt: skip


def test_its_own_rate_is_taken_as_it_is():
    """1e9 FLOPs at 0.2 of 100 TFLOP/s are 50 us, whatever is known of ratios."""
    curves = {"attention_forward": of("flash3"), "attention_forward/sdpa_flash": of(None, 0.2)}
    machine = with_curves(curves, compute_capability=HOPPER)
    assert work_time(attention("sdpa_flash"), machine).alone_ns == pytest.approx(50_000)
    assert work_time(attention("flash3"), machine).alone_ns == pytest.approx(25_000)


@pytest.mark.parametrize(
    ("unit", "implementation", "ratio"),
    [
        ("attention_forward", "sdpa_flash", 306 / 660),
        ("attention_backward", "sdpa_flash", 166 / 474),
        ("attention_forward", "sdpa_cudnn", 566 / 660),
        ("attention_backward", "sdpa_cudnn", 470 / 474),
        ("attention_forward", "flash4", 1.0),
        ("attention_forward", "eager", 1.0),
    ],
)
def test_on_hopper_another_is_slower_by_what_is_told_of_both(unit, implementation, ratio):
    """flash3's 1e9 FLOPs at 0.4 of 100 TFLOP/s take 25 us."""
    machine = with_curves({unit: of("flash3")}, compute_capability=HOPPER)
    time_ns = work_time(attention(implementation, unit), machine).alone_ns
    assert time_ns == pytest.approx(25_000 / ratio)


@pytest.mark.parametrize("implementation", [None, "sdpa_flash"])
def test_work_of_old_documents_and_curves_of_nobody_are_priced_as_before(implementation):
    stated = of("flash3") if implementation is None else of(None)
    machine = with_curves({"attention_forward": stated}, compute_capability=HOPPER)
    assert work_time(attention(implementation), machine).alone_ns == pytest.approx(25_000)


def test_a_curve_of_nobody_is_of_what_the_profile_chooses():
    choice = AttentionChoice(name="flash4", kind="measured", source="test")
    machine = with_curves({"attention_forward": of(None)}, attention=choice)
    machine = machine.model_copy(update={"compute_capability": HOPPER})
    assert work_time(attention("sdpa_flash"), machine).alone_ns == pytest.approx(25_000 * 660 / 306)
    assert curve_for(attention("flash4"), machine).of == "flash4"


def test_where_only_others_are_stated_the_profiles_choice_is_the_one():
    choice = AttentionChoice(name="flash4", kind="measured", source="test")
    curves = {
        f"attention_forward/{n}": of(None, m) for n, m in (("sdpa_flash", 0.2), ("flash4", 0.4))
    }
    machine = with_curves(curves, attention=choice, compute_capability=HOPPER)
    for implementation in ("flash3", None):
        assert curve_for(attention(implementation), machine).key == "attention_forward/flash4"
    unchosen = machine.model_copy(update={"attention": None})
    found = curve_for(attention("flash3"), unchosen)
    assert found.key == "attention_forward/sdpa_flash"
    assert work_time(attention("flash3"), unchosen).alone_ns == pytest.approx(50_000 * 306 / 660)


def test_a_curve_of_its_own_is_made_at_the_price_it_had_and_fitted_alone():
    curves = {"attention_forward": of("flash3"), "attention_forward/head_dim_64": of("flash3", 0.2)}
    base = with_curves(curves, compute_capability=HOPPER)
    works = [attention("sdpa_flash")]
    machine = with_own_rates(base, works)
    assert machine.efficiency["attention_forward/sdpa_flash"].max == pytest.approx(0.4 * 306 / 660)
    for head_dim in (128, 64):
        work = attention("sdpa_flash", head_dim=head_dim)
        assert work_time(work, machine).alone_ns == pytest.approx(work_time(work, base).alone_ns)
    start = prepared(machine)
    [fitted] = [p for p in declared_parameters(start, works) if p.name == "attention_forward"]
    assert [t.curve for t in fitted.targets] == [
        "attention_forward/sdpa_flash", "attention_forward/sdpa_flash/head_dim_64"
    ]  # fmt: skip
    assert with_own_rates(base, [attention("flash3"), attention(None)]) == base


def test_the_hash_tells_whose_rate_a_curve_is_and_is_as_before_where_none_says():
    named, unnamed = (with_curves({"attention_forward": of(n)}) for n in ("flash3", None))
    assert named.content_hash != unnamed.content_hash
    assert toy_machine().content_hash == "fab97c3b108246c5"  # of a version that knew no such field
    assert load_machine_text(profile_toml(named)) == named

"""Reading, inheriting, overriding and writing profiles, and every way to get it wrong."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.hardware_profiles.machines import number, toy_machine
from twinstream.hardware_profiles.errors import ProfileError
from twinstream.hardware_profiles.loader import (
    load_machine,
    load_machine_text,
    machine_names,
    override,
    save_machine,
)
from twinstream.hardware_profiles.profile_files import profile_toml
from twinstream.schedule.errors import TwinstreamError

HEAD = 'name = "m"\ndescription = ""\ndevice = "cuda"\n'


@pytest.fixture
def write(tmp_path):
    def write_file(name, text):
        (tmp_path / name).write_text(text, encoding="utf-8")
        return tmp_path / name

    return write_file


def test_a_name_may_be_written_in_capitals():
    assert load_machine("H100") == load_machine("h100")


def test_a_machine_inherits_and_overrides_by_plain_number(write):
    link = "pcie_h2d_bytes_per_s = 128e9\npcie_duplex_bytes_per_s = 192e9\n"
    machine = load_machine(write("fast.toml", f'base = "h100"\n{link}'))
    assert machine.name == "fast"
    assert machine.pcie_h2d_bytes_per_s is not None
    assert machine.pcie_h2d_bytes_per_s.value == 128e9
    assert machine.pcie_h2d_bytes_per_s.kind == "hypothetical"
    assert machine.pcie_h2d_bytes_per_s.source == "override in fast.toml"
    assert machine.pcie_d2h_bytes_per_s == load_machine("h100").pcie_d2h_bytes_per_s
    assert machine.efficiency == load_machine("h100").efficiency
    assert machine.content_hash != load_machine("h100").content_hash


def test_a_machine_inherits_and_overrides_by_full_table():
    machine = load_machine_text(
        'base = "h100"\nname = "mine"\ndescription = "as probed"\n'
        "[hbm_bytes_per_s]\nvalue = 3000e9\nkind = 'measured'\nsource = 'probe'\n"
        "[efficiency.gelu]\nmax = 0.5\nhalf = 0\nof = 'bytes'\nkind = 'fitted'\nsource = '3 runs'\n"
    )
    assert (machine.name, machine.description) == ("mine", "as probed")
    assert machine.hbm_bytes_per_s is not None
    assert machine.hbm_bytes_per_s.kind == "measured"
    assert set(machine.efficiency) == {*load_machine("h100").efficiency, "gelu"}


def test_a_plain_number_changes_the_maximum_of_an_inherited_curve():
    machine = load_machine_text('base = "h100"\nefficiency.matmul = 0.5\n', source="slow.toml")
    before, after = load_machine("h100").efficiency["matmul"], machine.efficiency["matmul"]
    assert (after.max, after.half, after.of) == (0.5, before.half, before.of)
    assert after.kind == "hypothetical"
    assert after.source.startswith(f"override in slow.toml; max was {before.max:g}")


def test_a_base_may_be_a_path_relative_to_the_file(write, monkeypatch, tmp_path_factory):
    write("a.toml", 'base = "b.toml"\nhbm_bytes_per_s = 2e12\n')
    path = write("b.toml", 'base = "a100"\nhbm_bytes_per_s = 1e12\nhost_memory_bytes = 1e9\n')
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    machine = load_machine(path.parent / "a.toml")
    assert machine.number("hbm_bytes_per_s") == 2e12
    assert machine.number("host_memory_bytes") == 1e9
    assert machine.number("peak_bf16_flop_per_s") == 312e12


def test_a_size_may_be_a_text(write):
    text = 'base = "h100"\ndevice_memory_bytes = "48GiB"\n[host_memory_bytes]\nvalue = "1.5TB"\n'
    machine = load_machine(write("big.toml", text + "kind = 'measured'\nsource = 'free -b'\n"))
    assert machine.number("device_memory_bytes") == 48 * 2**30
    assert machine.device_memory_bytes.source == "override in big.toml"
    assert machine.number("host_memory_bytes") == 1.5e12


def test_infinity_in_a_profile_is_unconstrained():
    both = "pcie_h2d_bytes_per_s = inf\npcie_duplex_bytes_per_s = inf\n"
    machine = load_machine_text(f'base = "h100"\n{both}')
    assert machine.rate("pcie_h2d_bytes_per_s") == math.inf
    assert machine.pcie_h2d_bytes_per_s is not None
    assert machine.pcie_h2d_bytes_per_s.kind == "unconstrained"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("pcie_h2d_bytes_per_s = 128e9\npcie_d2h_bytes_per_s = 128e9", "= 2.56e+11"),
        ("pcie_h2d_bytes_per_s = 32e9", "= 9.6e+10"),
        ("pcie_duplex_bytes_per_s = 63e9", "carries alone, 6.4e+10, and at most 1.28e+11"),
        ("pcie_duplex_bytes_per_s = 129e9", "state pcie_duplex_bytes_per_s = 1.28e+11"),
    ],
)
def test_a_link_whose_both_directions_do_not_fit_each_is_refused_with_the_line(lines, said):
    with pytest.raises(ProfileError, match=re.escape(said)):
        load_machine_text(f'base = "h100"\n{lines}\n')
    load_machine_text('base = "h100"\npcie_h2d_bytes_per_s = 64e9\n')  # as it is
    load_machine_text('base = "h100"\npcie_duplex_bytes_per_s = 64e9\n')


@pytest.mark.parametrize(
    ("changes", "h2d", "d2h", "duplex"),
    [
        ({"h2d": 128e9}, 128e9, 64e9, 192e9),
        ({"h2d": 32e9}, 32e9, 64e9, 96e9),
        ({"h2d": math.inf}, math.inf, 64e9, math.inf),
        ({"duplex": 32e9}, 32e9, 32e9, 32e9),
        ({"duplex": 256e9}, 64e9, 64e9, 128e9),
        ({"h2d": 128e9, "d2h": 128e9, "duplex": 200e9}, 128e9, 128e9, 200e9),
    ],
)
def test_the_rest_of_a_link_follows_a_what_if(changes, h2d, d2h, duplex):
    rates = {f"pcie_{way}_bytes_per_s": rate for way, rate in changes.items()}
    machine = override(load_machine("h100"), rates)
    found = [machine.number(f"pcie_{way}_bytes_per_s") for way in ("h2d", "d2h", "duplex")]
    assert found == [h2d, d2h, duplex]


def test_both_directions_keep_their_share_of_the_sum_and_a_what_if_that_breaks_it_is_refused():
    faster = override(load_machine("cpu"), {"pcie_h2d_bytes_per_s": 16e9})
    assert faster.number("pcie_duplex_bytes_per_s") == 12 / 16 * 24e9
    wrong = {"pcie_h2d_bytes_per_s": 128e9, "pcie_duplex_bytes_per_s": 100e9}
    with pytest.raises(ProfileError, match="at least what the faster carries alone"):
        override(load_machine("h100"), wrong)


def test_a_text_without_a_base_leaves_the_rest_unknown():
    machine = load_machine_text('device = "cuda"\nhbm_bytes_per_s = 1e12\n', source="x/my.toml")
    assert machine.name == "my"
    assert machine.number("hbm_bytes_per_s") == 1e12
    assert machine.host_dram_bytes_per_s is None
    assert machine.efficiency == {}


def test_a_what_if_changes_one_number_and_tells_what_it_was():
    h100 = load_machine("h100")
    changes = {"pcie_h2d_bytes_per_s": 128e9, "efficiency.h2d": 0.9}
    machine = override(h100, changes)
    assert machine.name == "h100+what-if"
    assert machine.rate("pcie_h2d_bytes_per_s") == pytest.approx(0.9 * 128e9)
    assert machine.pcie_h2d_bytes_per_s is not None
    assert machine.pcie_h2d_bytes_per_s.source == "what-if; was 6.4e+10 (datasheet)"
    assert machine.number("pcie_d2h_bytes_per_s") == 64e9
    assert h100 == load_machine("h100")
    twice = override(machine, {"hbm_bytes_per_s": math.inf})
    assert twice.name == "h100+what-if"
    assert twice.rate("hbm_bytes_per_s") == math.inf


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"pcie_h2d_byte_per_s": 1.0},
            "unknown field 'pcie_h2d_byte_per_s': did you mean 'pcie_",
        ),
        ({"hbm_bytes_per_s": -1.0}, "machine 'h100': hbm_bytes_per_s: -1.0 is negative"),
        ({"hbm_bytes_per_s": math.nan}, "hbm_bytes_per_s.value: Input should be a finite number"),
        ({"launch_latency_ns": math.inf}, "launch_latency_ns: a cost cannot be unconstrained"),
        ({"efficiency.gelu": 0.5}, "efficiency.gelu: a plain number changes the max of an exist"),
        ({"efficiency.matmul": 2.0}, "efficiency.matmul.max: .* less than or equal to 1.5, got 2"),
    ],
)
def test_a_wrong_what_if_is_one_clear_error(changes, message):
    with pytest.raises(ProfileError, match=message) as caught:
        override(load_machine("h100"), changes)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None or caught.value.__suppress_context__


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEAD + "x = [1,\n", r"p.toml is not valid TOML: .*line 4"),
        (HEAD + "name = 'again'\n", r"p.toml is not valid TOML: .*line 4"),
        ('base = "h1000"\n', r"unknown base 'h1000': .*did you mean 'h100'"),
        (
            'base = "zzz.toml"\n',
            r"unknown base 'zzz.toml': .*known: a100, a100_40gb, .*b200, .*cpu.*zzz.toml",
        ),
        ("base = 3\n", "base needs a name or a path in quotes, got 3"),
        ('base = "h100"\npcie_h2d_gb_per_s = 64\n', "did you mean 'pcie_h2d_bytes_per_s'"),
        ('base = "h100"\n[hbm_bytes_per_s]\nvalues = 1\n', "'hbm_bytes_per_s.values': did you mea"),
        ('base = "h100"\n[hbm_bytes_per_s]\nvalue = 1\n', "hbm_bytes_per_s.kind is missing; hbm_b"),
        ('base = "h100"\nhbm_bytes_per_s = -5\n', "p.toml: hbm_bytes_per_s: -5.0 is negative"),
        ('base = "h100"\nhbm_bytes_per_s = "fast"\n', "hbm_bytes_per_s needs a number or a table"),
        ('base = "h100"\nhbm_bytes_per_s = true\n', "hbm_bytes_per_s needs a number or a table"),
        ('base = "h100"\nefficiency = 0.8\n', r"efficiency needs tables \[efficiency"),
        ('base = "h100"\nefficiency.matmull = 0.8\n', "efficiency.matmull: a plain number changes"),
        ('base = "h100"\ncompute_capability = 9.0\n', "capability needs a table, got 9.0"),
        (
            'base = "h100"\n[compute_capability]\nvalue = "sm_90"\n',
            "compute_capability.value: .*got 'sm_90'",
        ),
        ('base = "h100"\nefficiency.matmul = "x"\n', "efficiency.matmul needs a number or a tab"),
        ('base = "h100"\ndevice = "tpu"\n', "device: Input should be 'cuda' or 'cpu', got 'tpu'"),
        (
            'base = "h100"\n[efficiency.hbm]\nmaxx = 1\n',
            "hbm.maxx': did you mean 'max'",
        ),
        (
            "zzzzzz = 1\n" + HEAD,
            "unknown field 'zzzzzz': known: base, name, description, dev",
        ),
        ('name = "m"\n', "device is missing"),
        ('base = "h100"\ndevice_memory_bytes = "48Gib"\n', "_bytes: cannot read the size '48Gib'"),
        ('base = "h100"\nhost_memory_bytes = "48"\n', "host_memory_bytes: '48' is so many bytes"),
        ('base = "h100"\nhbm_bytes_per_s = "3TB"\n', "hbm_bytes_per_s needs a number or a table"),
    ],
)
def test_a_wrong_profile_is_one_clear_error(write, text, message):
    with pytest.raises(ProfileError, match=message) as caught:
        load_machine(write("p.toml", text))
    assert isinstance(caught.value, TwinstreamError)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None or caught.value.__suppress_context__
    assert "\n" not in str(caught.value)
    assert "pydantic" not in str(caught.value)


def test_profiles_that_inherit_in_a_circle_are_refused(write):
    write("a.toml", 'base = "b.toml"\n')
    path = write("b.toml", 'base = "a.toml"\n')
    with pytest.raises(ProfileError, match=r"in a circle: b.toml -> a.toml -> b.toml$"):
        load_machine(path)


def test_a_name_near_a_shipped_machine_gets_it_as_a_hint():
    with pytest.raises(ProfileError, match="unknown machine 'rtx409': did you mean 'rtx4090'"):
        load_machine("rtx409")


def test_an_unknown_machine_lists_the_known_ones_and_how_to_add_one():
    with pytest.raises(ProfileError) as caught:
        load_machine("b900")
    assert "unknown machine 'b900'" in str(caught.value)
    assert ", ".join(machine_names()) in str(caught.value)
    assert "base = " in str(caught.value)
    assert "twinstream probe" in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(write, tmp_path):
    with pytest.raises(ProfileError, match=r"cannot read profile .*no\.toml: No such file"):
        load_machine(tmp_path / "no.toml")
    with pytest.raises(ProfileError, match=r"cannot read profile .*: Is a directory"):
        load_machine(tmp_path)
    path = write("latin.toml", "")
    path.write_bytes(b'name = "\xe9"\n')
    with pytest.raises(ProfileError, match="not UTF-8 text: byte 8"):
        load_machine(str(path))


@pytest.mark.parametrize("name", machine_names())
def test_a_saved_machine_loads_back_equal(name, tmp_path):
    machine = load_machine(name)
    save_machine(machine, tmp_path / "copy.toml")
    assert load_machine(tmp_path / "copy.toml") == machine
    assert load_machine(tmp_path / "copy.toml").content_hash == machine.content_hash


def test_an_unconstrained_number_survives_saving(tmp_path):
    machine = override(toy_machine(), {"hbm_bytes_per_s": math.inf})
    save_machine(machine, str(tmp_path / "free.toml"))
    assert load_machine(str(tmp_path / "free.toml")) == machine


@given(text=st.text(), value=st.floats(min_value=1e5, max_value=1e21))
def test_any_text_and_any_value_survive_saving(text, value):
    update = {"description": text, "hbm_bytes_per_s": number(value)}
    machine = toy_machine().model_copy(update=update)
    assert load_machine_text(profile_toml(machine)) == machine

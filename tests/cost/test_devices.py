"""`cost_devices` against what davidsj/ml_par_sim's run_optimizer2.ipynb printed, and by hand."""

from itertools import pairwise

import pytest

from twinstream.cost.devices import cost_devices
from twinstream.schedule.errors import TwinstreamError

NOTEBOOK = {"memory_bytes_per_s": 3352e9}  # of an H100 there


def test_the_printed_utilisation_is_reproduced():
    """The notebook (0c51a5b) prints it of the soonest end on at most 15e6 devices: of 1e26 FLOPs
    at 1 GB/s, where devices sum among themselves.
    """
    found = cost_devices(1e26, **NOTEBOOK, network_bytes_per_s=1e9, network_sums=False)
    fastest = found["fastest"]
    assert fastest["utilization"] == pytest.approx(0.002247441363464536, rel=1e-12)


def test_the_model_is_the_notebooks():
    found = cost_devices(1e27, **NOTEBOOK)
    assert found["params"] == pytest.approx((1e27 / 120) ** 0.5)
    assert found["tokens"] == pytest.approx(20 * found["params"])
    assert found["batch_tokens"] == pytest.approx(4e6 * 100 ** (1 / 6))
    assert found["blocks"] == pytest.approx(120 * 100 ** (1 / 6))
    assert 10 * found["blocks"] * found["width"] ** 2 == pytest.approx(found["params"])
    first = found["rows"][0]
    assert first["devices"] == 1 and first["utilization"] == pytest.approx(0.8)
    days = 1e27 / (0.8 * 1979e12 / 2) / 86400
    assert first["days"] == pytest.approx(days)


def test_a_slow_network_wastes_many_devices_first():
    def last(bandwidth):
        found = cost_devices(1e27, **NOTEBOOK, network_bytes_per_s=bandwidth)
        return found["rows"][-1]["utilization"]

    slow, fast = last(5e9), last(900e9)
    assert slow < 0.03 and fast > 0.7


def test_degrees_make_up_the_devices_and_double():
    rows = cost_devices(1e27, **NOTEBOOK, network_bytes_per_s=5e9)["rows"]
    for row in rows:
        degrees = row["pp"] * row["dp"] * row["tp_residual"] * row["tp_hidden"]
        assert row["devices"] == degrees and row["pp"] <= row["microbatches"]
    assert all(b["devices"] == 2 * a["devices"] for a, b in pairwise(rows))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"flops": 0}, "flops is 0"),
        ({"flops": 1e27, "network_bytes_per_s": -1}, "network_bytes_per_s is -1"),
        ({"flops": 1e20, "memory_bytes_per_s": 1}, "does not reach a utilization"),
        ({"flops": 1e10}, "1e\\+10 FLOPs make a model of no whole block"),
    ],
)
def test_what_cannot_be_is_told(asked, said):
    with pytest.raises(TwinstreamError, match=said):
        cost_devices(**asked)

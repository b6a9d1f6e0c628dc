"""Prices by the name of a machine, cluster or chip, the same in every command and from Python."""

from pathlib import Path

import pytest

import twinstream as ts
from tests.front_door.command_line import call, error_of
from twinstream.cost.bill import CostError, Prices
from twinstream.study.answer import StudyError
from twinstream.study.sweep.config import config_of

PRICES = "h100=$2.50, b200=6"
TINY = ("--model", "tiny", "--seq-len", 64, "--tokens-per-step", 64)
COST = ("cost", "llama3-70b", "--cluster", "h100_dgx", "--dp", 8, "--microbatch-size", 8)
FIXED = {"model": "8b", "seq_len": 64, "price_per_gpu_hour": "h100=2.5,b200=6"}


@pytest.mark.parametrize(
    ("place", "price"), [(("--machine", "h100"), 2.5), (("--machine", "b200"), 6.0),
                         (("--cluster", "b200_dgx", "--gpus", 1), 6.0)],
)  # fmt: skip
def test_a_plan_has_the_price_of_its_machine(place, price):
    """Money is hours times it: 1e9 tokens at the predicted speed."""
    found = call("plan", *TINY, *place, "--tokens", 1e9, "--price", PRICES, "--json").json()
    hours = 1e9 / found["tokens_per_s"] / 3600
    assert found["bill"]["money"] == pytest.approx(hours * price)


def test_a_whatif_of_another_machine_has_that_machines_price():
    asked = (*TINY, "--machine", "h100", "--tokens", 1e9, "--price", PRICES)
    found = call("whatif", *asked, "--set", "machine=b200", "--json").json()
    [other] = found["answers"]
    bills = found["base"]["bill"], other["anew"]["bill"]
    assert [bill["price_per_gpu_hour"] for bill in bills] == [2.5, 6.0]
    told = error_of("whatif", *asked, "--set", "machine=rtx4090")
    assert "is of h100, b200, and this is of rtx4090" in told


def test_python_and_sweeps_read_the_same():
    answer = ts.query(model="tiny", machine="b200", seq_len=64, tokens_per_step=64).answer()
    hours = 1e9 / answer.tokens_per_s / 3600
    for prices in (PRICES, {"h100": 2.5, "b200": 6.0}, 6):
        bill = ts.cost_of_run(answer, 1e9, price_per_gpu_hour=prices)
        assert bill.money == pytest.approx(6 * hours)
    document = {"fixed": FIXED, "axes": {"machine": ["h100", "b200"]}}
    cells = config_of(document, source="a sweep", folder=Path()).cells()
    assert [cell.price_per_gpu_hour for cell in cells] == [2.5, 6.0]


@pytest.mark.parametrize(
    ("name", "price"), [("h100", 2.5), ("h100_training", 3.0), ("H100_DGX", 3.5)]
)
def test_a_sweep_of_a_cluster_takes_the_price_of_its_node_and_gpu_as_plan_does(name, price):
    """A cluster's own name comes first; a price of what the sweep is not of is refused."""
    fixed = {**FIXED, "global_batch": 8, "gpus": 8, "price_per_gpu_hour": {name: price, "b200": 6}}
    document = {"fixed": fixed, "axes": {"cluster": ["h100_dgx", "b200_dgx"]}}
    cells = config_of(document, source="a sweep", folder=Path()).cells()
    assert [cell.price_per_gpu_hour for cell in cells] == [price, 6.0]
    document["axes"] = {"cluster": ["h100_dgx"]}
    if name != "H100_DGX":
        fixed["price_per_gpu_hour"] = {name: 1.0, "h100_dgx": 2.0}
        [cell] = config_of(document, source="a sweep", folder=Path()).cells()
        assert cell.price_per_gpu_hour == 2.0
    fixed["price_per_gpu_hour"] = {"a100": 1.0}
    with pytest.raises(StudyError, match="is of 'a100', and the sweep is of h100_dgx"):
        config_of(document, source="a sweep", folder=Path()).cells()


@pytest.mark.parametrize("given", ["h100=", "=2", "h100=-1", "nan", "h100=1,h100=2", "much", "1,2"])
def test_what_is_no_price_is_refused(given):
    told = error_of("plan", *TINY, "--machine", "h100", "--tokens", 1e9, "--price", given)
    assert "needs to be a price" in told and "h100=2.5,b200=6" in told


def test_a_price_of_nothing_here_is_refused():
    with pytest.raises(CostError, match=r"is of h100, and this is of cpu: write cpu=2\.5"):
        Prices(price_per_gpu_hour={"h100": 2.5}).of_place("cpu")
    told = error_of("cost", "8b", "--machine", "b200", "--price", "h100=2")
    assert "is of h100, and this is of b200: write b200=2.5" in told


def test_weights_that_exceed_a_gpu_are_told():
    """70.6 billion of them in 16 bits are 141 GB, of which four stages have a quarter each."""
    told = " ".join(call(*COST, "--price", PRICES).out.split())
    assert "This does not fit: the weights alone take 141 GB of each GPU, which has 86 GB" in told
    assert "at 2.50 a GPU-hour" in told
    assert "does not fit" not in call(*COST, "--pp", 4).out

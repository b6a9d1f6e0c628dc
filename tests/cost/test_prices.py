"""Goodput, wall time and money."""

from math import sqrt

import pytest

from tests.front_door.command_line import call, error_of
from twinstream.cost.bill import CostError, Prices, bill_of

RUN = ("cost", "1b", "--machine", "h100")


def test_goodput_is_what_checkpoints_lost_work_and_restarts_leave():
    often = Prices(checkpoint_s=30, checkpoint_interval_s=600, restart_s=900, mtbf_hours=2.5)
    assert often.goodput == pytest.approx(1 - 30 / 600 - (300 + 900) / 9_000)
    assert Prices(checkpoint_s=30, checkpoint_interval_s=600).goodput == pytest.approx(0.95)


def test_no_interval_is_better_than_the_best():
    best, failing = sqrt(2 * 30 * 9_000), Prices(checkpoint_s=30, restart_s=60, mtbf_hours=2.5)

    def goodput(interval_s: float) -> float:
        found = failing.model_copy(update={"checkpoint_interval_s": interval_s}).goodput
        assert found is not None
        return found

    assert failing.goodput == goodput(best)
    assert all(goodput(best) >= goodput(best * factor) for factor in (0.5, 0.9, 1.1, 2.0))


def test_what_leaves_no_time_to_train_is_refused():
    with pytest.raises(CostError, match="leave no time to train"):
        _ = Prices(checkpoint_s=600, checkpoint_interval_s=600).goodput
    with pytest.raises(CostError, match="leave no time to train"):
        _ = Prices(checkpoint_s=1, checkpoint_interval_s=60, restart_s=3600, mtbf_hours=1).goodput


def test_all_gpus_are_paid_for_all_the_wall_time():
    half = Prices(checkpoint_s=30, checkpoint_interval_s=60, price_per_gpu_hour=2.0)
    bill = bill_of(86400, 10, half)
    assert (bill.run_days, bill.wall_days) == (1, 2)
    assert (bill.gpu_hours, bill.money) == (480, 960)


def test_what_is_not_asked_for_is_not_told():
    found, screen = call(*RUN, "--json").json(), call(*RUN).out
    assert found["goodput"] is found["money"] is None
    assert found["wall_days"] == found["run_days"]
    assert "goodput" not in screen and "money" not in screen and "GPU-hours" in screen


def test_goodput_and_money_are_on_the_screen():
    charged = ("--price-per-gpu-hour", 2.5, "--checkpoint-s", 30, "--checkpoint-interval-s", 600)
    failing = (*charged, "--mtbf-hours", 3, "--restart-s", 600)
    found = call(*RUN, *failing, "--json").json()
    assert found["goodput"] == pytest.approx(0.95 - 900 / 10_800)
    assert found["money"] == pytest.approx(2.5 * 24 * found["run_days"] / found["goodput"])
    assert "86.67%" in call(*RUN, *failing).out
    assert "95.00%" in call(*RUN, *charged).out


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("--mtbf-hours", 3), "needs --checkpoint-s"),
        (("--checkpoint-s", 3), "--checkpoint-interval-s, or --mtbf-hours"),
        (("--checkpoint-s", 3, "--mtbf-hours", 3), "both --mtbf-hours and --restart-s"),
        (("--checkpoint-s", 0, "--mtbf-hours", 3, "--restart-s", 0), "no best interval"),
        (("--checkpoint-s", 3, "--mtbf-hours", -3, "--restart-s", 0), "--mtbf-hours needs to be"),
        (("--checkpoint-s", -3, "--checkpoint-interval-s", 3), "--checkpoint-s needs to be"),
        (("--price-per-gpu-hour", -3), "--price-per-gpu-hour needs to be"),
    ],
)
def test_prices_that_cannot_be_are_refused_in_a_sentence(given, told):
    message = error_of(*RUN, *given)
    assert told in message and message.count("\n") == 1

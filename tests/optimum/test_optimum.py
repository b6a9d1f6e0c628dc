"""Scaling laws against their papers' tables; the best size where law and speed agree."""

from types import SimpleNamespace

import pytest

from tests.front_door.command_line import call, error_of
from twinstream.models.presets import load_model
from twinstream.schedule.errors import TwinstreamError
from twinstream.study.optimum import optimum
from twinstream.study.optimum.laws import flops_of, law_named, scaling_laws
from twinstream.study.optimum.optimum import OptimumQuestion, find_optimum
from twinstream.study.optimum.shapes import spec_near

# arXiv:2203.15556, tables 3 and A3: parameters, FLOPs (of 175B by approach 3 it prints 1.26e24,
# where 6 N D of its own tokens is 1.26e25).
TABLES = {
    "chinchilla-1": [(400e6, 1.92e19), (1e9, 1.21e20), (10e9, 1.23e22), (67e9, 5.76e23),
                     (175e9, 3.85e24), (280e9, 9.90e24), (520e9, 3.43e25), (1e12, 1.27e26),
                     (10e12, 1.30e28)],
    "chinchilla-2": [(400e6, 1.84e19), (1e9, 1.20e20), (10e9, 1.32e22), (67e9, 6.88e23),
                     (175e9, 4.54e24), (280e9, 1.18e25), (520e9, 4.19e25), (1e12, 1.59e26),
                     (10e12, 1.75e28)],
    "chinchilla-3": [(400e6, 2.21e19), (1e9, 1.62e20), (10e9, 2.46e22), (67e9, 1.71e24),
                     (175e9, 1.26e25), (280e9, 3.52e25), (520e9, 1.36e26), (1e12, 5.65e26),
                     (10e12, 8.55e28)],
}  # fmt: skip
WITHIN = {"chinchilla-1": 0.04, "chinchilla-2": 0.05, "chinchilla-3": 0.08}


@pytest.mark.parametrize("name", TABLES)
def test_a_law_says_what_its_table_says(name):
    law = law_named(name)
    for params, flops in TABLES[name]:
        assert law.params(flops) == pytest.approx(params, rel=WITHIN[name])


def test_kaplan_is_his_table_6():
    law = law_named("kaplan")
    for days in (1.0, 100.0, 1e4):
        assert law.params(days * 8.64e19) == pytest.approx(1.3e9 * days**0.73)


def test_exponents_are_the_published_ones():
    assert law_named("besiroglu").powers[1] == pytest.approx(0.5126, abs=5e-4)
    assert law_named("chinchilla-3").powers[1] == pytest.approx(0.4565, abs=5e-4)
    assert law_named("twenty").tokens_of(70e9) == pytest.approx(1.4e12)


@pytest.mark.parametrize("name", scaling_laws())
def test_size_and_tokens_of_a_law_agree(name):
    law = law_named(name)
    for flops in (1e20, 1e24, 1e27):
        params = law.params(flops)
        assert flops_of(params, law.tokens_of(params)) == pytest.approx(flops)


@pytest.mark.parametrize("name", ["chinchilla-3", "besiroglu"])
def test_no_other_size_of_the_same_flops_has_a_lower_loss(name):
    law = law_named(name)
    best = law.params(1e24)
    assert law.loss is not None
    losses = [law.loss.loss(best * f, 1e24 / 6 / best / f) for f in (0.5, 0.9, 1.0, 1.1, 2.0)]
    assert min(losses) == losses[2]


@pytest.mark.parametrize("shape", ["llama", "gpt"])
@pytest.mark.parametrize("params", [1e9, 8e9, 76.04e9, 145.61e9, 405e9, 1e12])
def test_a_shape_has_about_the_parameters(shape, params):
    spec = spec_near(params, shape, 2048)
    assert spec.num_parameters == pytest.approx(params, rel=0.09)
    assert spec.num_heads * spec.head_dim == spec.d_model and spec.num_heads % 8 == 0


def test_megatrons_shapes_are_found_again():
    for name in ("gpt-76b", "gpt-145b"):
        spec, found = load_model(name), spec_near(load_model(name).num_parameters, "gpt", 2048)
        assert (found.num_layers, found.d_model) == (spec.num_layers, spec.d_model)


def at_mfu(mfu):
    """A prediction of so much of an A100's peak, 6 N a token."""

    def predict(asked, spec, gpus, batch):
        rate = mfu(spec) * gpus * 312e12 / 6 / spec.num_parameters
        return SimpleNamespace(
            tokens_per_s=rate, layout_text="tp8", mfu=mfu(spec),
            uncertainty=SimpleNamespace(mean=0.1, symmetric=0.1),
        )  # fmt: skip

    return predict


def test_the_size_is_the_laws_at_the_flops_that_are_reached():
    asked = OptimumQuestion(cluster="a100_dgx", gpus=(1024,), days=20.0, law="twenty")
    run = find_optimum(asked, at_mfu(lambda spec: 0.35)).best[0]
    flops = 0.35 * 1024 * 312e12 * 20 * 86400
    assert run.flops == pytest.approx(flops)
    assert run.params == pytest.approx((flops / 120) ** 0.5, rel=0.03)
    assert run.days == pytest.approx(20)
    at_peak, days = find_optimum(asked, at_mfu(lambda spec: 0.35)).at_full_peak[1024]
    assert at_peak == pytest.approx((flops / 0.35 / 120) ** 0.5)
    assert days == pytest.approx(20 / 0.35)


def test_of_models_the_largest_that_ends_in_time_is_chosen():
    """vTrain's case 3: 3,360 A100 in 30 days, 20 tokens a parameter: 145.61B with 2,912B tokens
    take 85, 76.04B with 1,521B end in time (arXiv:2312.12391).
    """
    asked = OptimumQuestion(
        cluster="a100_dgx", gpus=(3360,), days=30.0, law="twenty", price_per_gpu_hour=2.0,
        models=("gpt-39b", "gpt-76b", "gpt-145b"),
    )  # fmt: skip
    found = find_optimum(asked, at_mfu(lambda spec: 0.3556))
    by_name = {run.model: run for run in found.tried}
    assert found.best[0].model == "gpt-76b" and not by_name["gpt-145b"].ends_in_time
    assert by_name["gpt-76b"].tokens == pytest.approx(1521e9, rel=0.001)
    assert by_name["gpt-145b"].tokens == pytest.approx(2912e9, rel=0.001)
    assert found.best[0].money == pytest.approx(found.best[0].days * 24 * 3360 * 2.0)


def test_money_is_time_on_so_many_gpus():
    budget = 512 * 24 * 10 * 2.5
    asked = OptimumQuestion(
        cluster="a100_dgx", gpus=(512, 256), budget=budget, price_per_gpu_hour={"a100": 2.5}
    )
    found = find_optimum(asked, at_mfu(lambda spec: 0.4))
    assert [run.days for run in found.best] == pytest.approx([10, 20])
    assert [run.money for run in found.best] == pytest.approx([budget, budget])


def test_where_speed_falls_with_size_the_least_loss_is_chosen():
    asked = OptimumQuestion(cluster="a100_dgx", gpus=(1024,), days=20.0, law="besiroglu")
    found = find_optimum(asked, at_mfu(lambda spec: 0.5 if spec.num_parameters < 5e10 else 0.3))
    losses = [run.loss for run in found.tried]
    assert found.best[0].loss == min(losses)
    run = found.best[0]
    assert run.loss_low <= run.loss <= run.loss_high


def test_gpus_on_which_nothing_fits_are_told_and_left_out():
    def predict(asked, spec, gpus, batch):
        if gpus == 8:
            raise TwinstreamError("needs 5 GiB more")
        return at_mfu(lambda spec: 0.4)(asked, spec, gpus, batch)

    asked = OptimumQuestion(cluster="a100_dgx", gpus=(8, 64), flops=1e23)
    found = find_optimum(asked, predict)
    assert [run.gpus for run in found.best] == [64] and found.refused == {8: "needs 5 GiB more"}
    with pytest.raises(TwinstreamError, match="on 8 GPUs: needs 5 GiB more"):
        find_optimum(asked.model_copy(update={"gpus": (8,)}), predict)


def test_the_command_tells_and_draws_it(monkeypatch, tmp_path):
    monkeypatch.setattr(optimum.find_optimum, "__defaults__",
                        (at_mfu(lambda spec: 0.4), lambda text: None))  # fmt: skip
    page = tmp_path / "page.html"
    asked = ("optimum", "--gpus", "64,128", "--flops", "1e22", "--cluster", "a100_dgx")
    told = call(*asked, "--html", page)
    assert told.code == 0, told.err
    assert "besiroglu" in told.out and "40.0% +/- 10%" in told.out
    assert "Utilisation over GPUs" in page.read_text()
    found = call(*asked, "--json").json()
    assert [run["gpus"] for run in found["best"]] == [64, 128]
    assert {law["name"] for law in found["laws"]} == set(scaling_laws())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--gpus", "64"), "give --days, --flops or --budget"),
        (("--gpus", "64", "--days", "1", "--flops", "1e20"), "got --days and --flops"),
        (("--gpus", "64", "--budget", "100"), "--budget needs --price"),
        (("--gpus", "6x", "--days", "1"), "--gpus needs whole numbers"),
        (("--gpus", "0", "--days", "1"), "--gpus needs whole numbers from 1"),
        (("--gpus", "64", "--days", "-1"), "--days"),
        (("--gpus", "64", "--days", "1", "--law", "x"), "--law 'x' is unknown"),
        (("--gpus", "64", "--days", "1", "--cluster", "x"), "unknown cluster 'x'"),
        (("--gpus", "64", "--days", "1", "--price", "b200=1"), "no price is of h100_dgx"),
        (("--gpus", "8", "--flops", "1e10"), "are fewer than"),
        (("--gpus", "8", "--flops", "1e20", "--set", "tpp=3"), "tpp"),
    ],
)
def test_what_cannot_be_is_told_in_a_line(options, said):
    told = error_of("optimum", *options)
    assert said in told and told.count("\n") == 1, told


def test_a_size_is_predicted_as_plan_does():
    fixed = {"tp": 1, "pp": 1, "cp": 1, "zero": 1, "recompute": "none", "offload": False}
    settings = [f"--set={name}={value}" for name, value in fixed.items()]
    where = ("--cluster", "rtx4090_ethernet", "--gpus", 2, "--seq-len", 1024, "--global-batch", 8)
    found = call("optimum", *where, "--flops", 1e20, *settings, "--json").json()["best"][0]
    assert found["params"] == pytest.approx(law_named("besiroglu").params(1e20), rel=0.05)
    named = call("optimum", *where, "--flops", 1e20, "--model", "1b", *settings, "--json").json()
    flags = ("--tp", 1, "--pp", 1, "--cp", 1, "--zero", 1, "--recompute", "none", "--no-offload")
    plan = call("plan", *where, "--model", "1b", *flags, "--json").json()
    assert named["best"][0]["tokens_per_s"] == pytest.approx(plan["layouts"][0]["tokens_per_s"])

"""Queries from Python: what `whatif`, `sweep`, `explore` and `cost` of the command line answer."""

import socket

import pytest

import twinstream as ts
from tests.front_door.command_line import TINY_STEP, call
from twinstream.models.loss import Dpo
from twinstream.options.plan_options import ClusterOptions, PlanOptions
from twinstream.schedule.errors import TwinstreamError
from twinstream.study.values import NAMES

TINY = {"model": "tiny", "machine": "cpu", "seq_len": 64, "tokens_per_step": 256}
STREAMING = {**TINY, "device_mem": "8MiB", "host_mem": "80MiB", "policy": "streaming"}
LAYOUT = {"model": "1b", "cluster": "h100_dgx", "gpus": 8, "seq_len": 512, "global_batch": 16}


def test_a_query_of_a_machine_is_answered_as_plan_does():
    flags = [part for name in ("device_mem", "host_mem", "policy")
             for part in (f"--{name.replace('_', '-')}", STREAMING[name])]  # fmt: skip
    planned = call("plan", *TINY_STEP, "--machine", "cpu", *flags, "--json").json()
    answer = ts.query(**STREAMING).answer()
    assert (answer.tokens_per_s, answer.mfu) == (planned["tokens_per_s"], planned["mfu"])
    assert answer.device_bytes == planned["device_peak_bytes"]
    assert answer.gap == planned["gap"]


def test_a_query_of_a_cluster_is_answered_as_plan_does():
    flags = [
        part for name, value in LAYOUT.items() for part in (f"--{name.replace('_', '-')}", value)
    ]
    (best, *_) = call("plan", *flags, "--json").json()["layouts"]
    answer = ts.query(**LAYOUT).answer()
    assert (answer.layout_text, answer.tokens_per_s) == (best["layout_text"], best["tokens_per_s"])


@pytest.mark.parametrize(
    ("values", "changes"),
    [
        (STREAMING, {"device_mem": "16MiB", "machine.hbm_bytes_per_s": 4e10, "seq_len": 128}),
        (LAYOUT, {"gpus": 16, "cluster.nic_bytes_per_s": 1e11, "zero": 3, "seq_len": 1024}),
    ],
)
def test_a_query_that_was_changed_is_that_of_the_values_together(values, changes):
    changed, together = ts.query(**values).changed(changes), ts.query(**{**values, **changes})
    assert changed.content == together.content != ts.query(**values).content


def test_a_memory_that_is_no_cap_follows_the_machines():
    """And one that is stays; a hypothesis may have more than the machine."""
    open_, capped = ts.query(**TINY), ts.query(**STREAMING)
    more = {"machine.device_memory_bytes": 2**36}
    assert open_.changed(more).request.caps.device_bytes == 2**36
    assert capped.changed(more).request.caps.device_bytes == 8 * 2**20
    assert capped.changed({"device_mem": "1TiB"}).request.caps.device_bytes == 2**40
    with pytest.raises(ts.TwinstreamError, match="is more than cpu has"):
        ts.query(**{**STREAMING, "device_mem": "1TiB"})


def test_a_plan_of_another_step_is_not_kept():
    answer = ts.query(**STREAMING).answer()
    longer = ts.query(**{**STREAMING, "seq_len": 128})
    with pytest.raises(ts.TwinstreamError, match="of another step"):
        longer.kept(answer)
    assert longer.answer([answer]).schedule.workload.seq_len == 128
    again = ts.query(**{**STREAMING, "machine.pcie_h2d_bytes_per_s": 4e9}).kept(answer)
    assert again.schedule is answer.schedule and again.tokens_per_s != answer.tokens_per_s


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({**TINY, "modle": "tiny"}, "modle is nothing that can be changed: did you mean 'model'"),
        ({"model": "tiny", "machine": "cpu"}, "seq_len is missing"),
        ({**TINY, "gpus": 8}, "gpus is of clusters, and this is of a machine"),
        ({**TINY, "lora": "much"}, "much"),
        ({**TINY, "aux_loss": -1}, "aux_loss needs to be at least 0, got -1"),
        ({**TINY, "clips": "yes"}, "clips needs true or false, got 'yes'"),
        ({**TINY, "dtype": "int8"}, "dtype 'int8' is unknown; known: "),
        ({**TINY, "optimizer": "here"}, "optimizer 'here' is unknown; known: device, device_"),
        ({**TINY, "home": "parameter=moon"}, "the home of 'parameter' is 'moon'"),
        ({**TINY, "optimizer_overhead": "2%"}, "leave out either it or --tokens-per-step"),
        ({**TINY, "ranks": 2, "recompute": "mlp"}, "'mlp' is unknown; known: none, full"),
        ({**LAYOUT, "kernels": "triton", "tp": 2}, "does not compute this layout: tp runs here"),
    ],
)
def test_what_cannot_be_asked_is_one_error(values, said):
    with pytest.raises(ts.TwinstreamError) as raised:
        ts.query(**values).answer()
    assert said in str(raised.value)


def test_a_sweep_from_python_has_the_rows_of_the_command(tmp_path):
    fixed = {name: value for name, value in STREAMING.items() if name != "device_mem"}
    config = {"fixed": fixed, "axes": {"device_mem": ["8MiB", "16MiB"]}}
    swept = ts.sweep(config, tmp_path / "rows", num_jobs=1)
    assert swept.rows[0]["tokens_per_s"] == str(ts.query(**STREAMING).answer().tokens_per_s)
    assert swept.page.is_file() and swept.file.is_file()


def test_the_cost_of_a_run_is_arithmetic_on_an_answer():
    answer = ts.query(**STREAMING).answer()
    bill = ts.cost_of_run(
        answer, 1e6, price_per_gpu_hour=3.0, checkpoint_s=1, mtbf_hours=5, restart_s=2
    )
    hours = 1e6 / answer.tokens_per_s / 3600 / bill.goodput
    assert bill.goodput < 1 and bill.money == pytest.approx(3 * hours)
    told = call("cost", "8b", "--machine", "h100", "--json").json()
    assert ts.cost_time("8b", machine="h100").run_s == pytest.approx(told["run_days"] * 86400)


def test_the_explorer_from_python_refuses_a_port_in_use():
    pytest.importorskip("dash", reason="Dash is not installed")
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ts.TwinstreamError, match="choose another --port"),
    ):
        ts.explore(port=taken.getsockname()[1])


def test_a_query_of_a_cluster_takes_tokens_and_caps_as_plan_does():
    in_tokens = {**{n: v for n, v in LAYOUT.items() if n != "global_batch"}, "micro_batch": 2}
    asked = ts.query(**in_tokens, tokens_per_step=16 * 512)
    assert asked.content == ts.query(**LAYOUT, micro_batch=2).content
    assert asked.content == ts.query(**LAYOUT, chunk_tokens=2 * 512).content
    capped = ts.query(**LAYOUT, device_mem="50%")
    assert capped.content != ts.query(**LAYOUT).content
    room = capped.answer().room_bytes[0]
    assert room is not None and room < 41 * 2**30
    for wrong in ({"tokens_per_step": 1000}, {"device_mem": "much"}, {"device_mem": "1TiB"}):
        with pytest.raises(ts.TwinstreamError):
            ts.query(**{**LAYOUT, **wrong})
    with pytest.raises(ts.TwinstreamError, match="global_batch is missing, or tokens_per_step"):
        ts.query(**in_tokens)


def test_ranks_are_planned_no_slower_than_by_any_layout_that_is_named():
    step = {"model": "1b", "machine": "h100", "ranks": 2, "seq_len": 2048}
    step |= {"tokens_per_step": 32768}
    found = ts.query(**step).answer().step_s
    named = ({"zero": 1}, {"zero": 0}, {"chunk_tokens": 16384}, {"dp": 2, "chunk_tokens": 4096})
    assert all(found <= ts.query(**step, **fixed).answer().step_s for fixed in named)


@pytest.mark.parametrize("more", [{}, {"ranks": 2}])
def test_a_loss_of_pairs_is_a_value_of_devices_and_of_ranks(more):
    step = {"model": "tiny", "machine": "cpu", "seq_len": 64, "tokens_per_step": 1024, **more}
    asked = ts.query(**step, loss="dpo,beta=0.3")
    assert asked.request.recipe.loss == Dpo(beta=0.3)
    assert asked.request.step.packing.expected_lengths == (64, 64)
    longer = asked.changed({"seq_len": 128})
    assert longer.request.step.packing.expected_lengths == (128, 128)


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("dtype", "float32", lambda asked: asked.spec.dtype == "float32"),
        ("clips", True, lambda asked: asked.recipe.clips),
        ("optim", "sgd", lambda asked: asked.recipe.update == "sgd"),
        ("freeze", "model.layers.0.*,model.layers.1.*",
         lambda asked: set(asked.recipe.frozen) == {"0", "1"}),
        ("home", "parameter=host,gradient=device",
         lambda asked: asked.choices.homes == {"parameter": "host", "gradient": "device"}),
        ("prefetch", 2.0, lambda asked: asked.choices.prefetch_blocks == 2.0),
        ("effort", "quick", lambda asked: asked.choices.effort == "quick"),
        ("recompute", "none", lambda asked: asked.choices.recompute == "none"),
        ("chunk_tokens", 128, lambda asked: asked.step.chunk_tokens == 128),
        ("device_mem", "50%", lambda asked: asked.caps.device_bytes * 2
         == asked.machine.number("device_memory_bytes")),
        ("attention", "eager", lambda asked: asked.recipe.kernels.attention == "eager"),
    ],
)  # fmt: skip
def test_every_option_of_plan_is_a_value_by_the_same_name(name, value, found):
    assert found(ts.query(**{**TINY, name: value}).request)


def test_names_of_values_are_those_of_options():
    """But for what a sweep may not do: run a folder's code, or show several layouts."""
    flags = {*PlanOptions.model_fields, *ClusterOptions.model_fields}
    values = {name for names in NAMES.values() for name in names}
    assert flags - values == {"trust_remote_code", "keep"}
    assert values - flags == {"ranks", "dp_overlap"}


def test_more_ranks_have_less_of_their_host_each():
    """Whether they are asked for at once, or instead of fewer."""
    two = ts.query(**TINY, ranks=2)
    four = ts.query(**TINY, ranks=4)
    whole = two.request.machine.number("host_memory_bytes")
    assert two.request.caps.host_bytes == whole // 2
    assert four.request.caps.host_bytes == whole // 4
    assert two.changed({"ranks": 4}).content == four.content
    capped = ts.query(**TINY, ranks=2, host_mem="1GiB").changed({"ranks": 4})
    assert capped.request.caps.host_bytes == 2**30


def test_adapters_are_values_of_a_cluster_too():
    asked = ts.query(**LAYOUT, lora="r=8,alpha=16", optim="adamw")
    assert asked.job.recipe.lora.rank == 8
    changed = ts.query(**LAYOUT).changed({"lora": "r=8,alpha=16"})
    assert changed.content == asked.content
    with pytest.raises(ts.TwinstreamError, match="cannot be changed of a query"):
        asked.changed({"dtype": "float32"})


def test_units_of_a_precision_can_be_varied():
    asked = {"model": "tiny", "cluster": "h100_dgx", "gpus": 8, "seq_len": 256, "global_batch": 16,
             "precision": "fp8", "tp": 1, "pp": 1, "micro_batch": 1}  # fmt: skip
    query = ts.query(**asked)
    other = query.changed({"precision_units": "products,head"})
    assert other.request.step.recipe.kernels.narrow == ("products", "head")
    same = ts.query(**asked, precision_units="head,products").request.step.recipe
    assert same == other.request.step.recipe
    with pytest.raises(TwinstreamError, match="is unknown; known: products"):
        query.changed({"precision_units": "embedding"})

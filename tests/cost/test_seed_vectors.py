"""Every recorded run of davidsj/ml_par_sim comes out of our functions.

`ml_par_sim_vectors.json` has arguments and outputs of its two programs, 22 of 44 recorded runs;
source and commit are in its `meta`. What is exact in it are Python floats after the run.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from twinstream.cost.bill import CostError
from twinstream.cost.time import TimedRun, time_of
from twinstream.cost.work import CountedRun, PassWork, micro_batch_sizes, work_of

RECORDED = json.loads((Path(__file__).parent / "ml_par_sim_vectors.json").read_text())["vectors"]
RUNS = [one for one in RECORDED if one["exit_ok"]]
REFUSED = [one for one in RECORDED if not one["exit_ok"]]
COUNTED, TIMED = "transformer.py", "simple_transformer.py"
TOLD = {  # what each refusal of the programs is about, in our words
    "T21_err_noise": "gradient noise.* 16,777,216, .* 8,388,608",
    "T23_err_microbatch": "arithmetic intensity.* 128, .* at most 16",
    "S19_err_layers": "5 does not divide the 24 layers",
}
CHIPS = {  # chips.py: FLOP/s in 8 bits, bytes/s of memory, bytes/s of the network both ways
    "H100": (1979e12, 3.35e12, 900e9),
    "A100_40GB": (624e12, 1.555e12, 600e9),
    "RTX4090": (165.16e12, 1.008e12, 10e9),
}
NAMES = {  # of their options
    "dataset_size": "dataset_tokens", "d_ffn": "d_ff", "d_head": "head_dim", "use_glu": "gated",
    "n_layers": "num_layers", "n_experts": "num_experts", "n_routed_experts": "num_routed",
    "pipeline_interleaving": "interleaving", "base_utilization": "utilization",
}  # fmt: skip


def options_of(run: dict[str, Any]) -> dict[str, Any]:
    """What was given, by our names; a switch is True."""
    found: dict[str, Any] = {}
    for word in run["args"]:
        if word.startswith("--"):
            name = word[2:].removeprefix("p_")
            found[NAMES.get(name, name)] = True
        else:
            name = list(found)[-1]
            number = float(word) if word.replace(".", "").replace("e", "").isdigit() else None
            whole = number is not None and name not in ("dataset_tokens", "utilization")
            found[name] = word if number is None else int(number) if whole else number
    return found


def counted(run: dict[str, Any]) -> CountedRun:
    """Its defaults are theirs: 64 a head, as many heads as are wide, one key head, 4 d_model."""
    given = options_of(run)
    for name in ("cluster_flop_rate", "skip_efficiency_check", "fwd_only"):
        given.pop(name, None)
    width = given["d_model"]
    heads = given.setdefault("num_heads", width // given.get("head_dim", 64))
    given["num_kv_heads"] = heads if given.pop("no_multi_query_attn", False) else 1
    return CountedRun.model_validate({"d_ff": 4 * width, **given})


def timed(run: dict[str, Any]) -> TimedRun:
    given = options_of(run)
    chip = given.pop("chip", None) or given.pop("chip_type", "H100")
    bits, (peak, memory, network) = given.pop("precision_bits", 8), CHIPS[chip]
    rates = {"flop_per_s": peak * 8 / bits, "memory_bytes_per_s": memory,
             "network_bytes_per_s": network, "value_bytes": bits / 8}  # fmt: skip
    return TimedRun.model_validate(rates | given)


def of_script(runs: list[dict[str, Any]], script: str) -> Any:
    chosen = [run for run in runs if run["script"] == script]
    return pytest.mark.parametrize("run", chosen, ids=[run["name"] for run in chosen])


def test_both_programs_and_their_refusals_are_there():
    assert len(RUNS) == 19 and len(REFUSED) == 3
    assert {run["script"] for run in RUNS} == {COUNTED, TIMED}


def figures(work: PassWork) -> tuple[float, float, float]:
    return work.flop, sum(work.sent.values()), sum(work.received.values())


@of_script(RUNS, COUNTED)
def test_every_exact_figure_of_a_count_comes_out(run):
    asked, exact, given = counted(run), run["exact"], options_of(run)
    found = work_of(asked)
    known: dict[str, float] = {
        "params": found.num_params, "D": found.num_tokens, "p": found.num_devices,
        "n_batches": found.num_batches,
    }  # fmt: skip
    for name, work in (("fwd", found.forward), ("bwd", found.backward), ("total", found.total)):
        flop, sent, received = figures(work)
        known |= {f"FLOP_{name}": flop, f"Tx_{name}": sent, f"Rx_{name}": received,
                  f"net_{name}": sent + received}  # fmt: skip
    passes = found.forward if "fwd_only" in given else found.total
    rate = given["cluster_flop_rate"]
    known["runtime_sec"] = passes.flop / rate / found.num_devices
    if (sizes := exact.get("allowed_microbatch_sizes")) is not None:
        assert micro_batch_sizes(asked) == tuple(sizes)
    for name, figure in exact.items():
        if name != "allowed_microbatch_sizes":
            assert known[name] == pytest.approx(figure, rel=1e-9, abs=0), name


@of_script(RUNS, TIMED)
def test_every_exact_figure_of_an_estimate_comes_out(run):
    asked, printed = timed(run), run["parsed"]
    found = time_of(asked)
    inner, outer, tokens = found.matmul_shape
    stages = asked.pp * asked.interleaving
    known = {
        "N": asked.num_routed * asked.expert_params, "P": found.num_params, "D": found.num_tokens,
        "p": found.num_gpus, "n_batches": found.num_batches, "total_flop": found.flop_total,
        "n_microbatches_per_batch": asked.batch_size // asked.microbatch_size,
        "n_pipeline_steps": stages, "pipe_boundary_intvl": found.layers_per_run,
        "pipeline_bubble_layers": (asked.pp - 1) * found.layers_per_run,
        "flop_per_batch": asked.flop_per_batch, "tokens_per_matmul": tokens,
        "d_int_per_matmul": inner, "d_per_matmul": outer, "matmul_time": found.matmul_s,
        "pipeline_bubble_time": found.bubble_s, "pipeline_full_flop_time": found.compute_s,
        "pipeline_full_net_time": found.network_s,
        "pipeline_full_time": max(found.compute_s, found.network_s),
        "gradient_reduction_time": found.gradient_s, "batch_time": found.batch_s,
        "util": found.utilization, "run_days": found.run_s / 86400,
    }  # fmt: skip
    for name, figure in run["exact"].items():
        assert known[name] == pytest.approx(figure, rel=1e-9, abs=0), name
    assert list(found.matmul_shape) == printed["matmul_shape"]
    assert found.batch_s == pytest.approx(printed["batch_s"], abs=5.1e-5)
    assert found.utilization == pytest.approx(printed["utilization"], abs=5.1e-5)


@of_script(REFUSED, COUNTED)
def test_what_a_rule_of_thumb_forbids_is_refused(run):
    with pytest.raises(CostError, match=TOLD[run["name"]]):
        micro_batch_sizes(counted(run))


@of_script(REFUSED, TIMED)
def test_what_does_not_come_apart_is_refused(run):
    with pytest.raises(CostError, match=TOLD[run["name"]]):
        time_of(timed(run))

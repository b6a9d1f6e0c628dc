"""Generating text, planned: against arithmetic, published rates, and caps that it does not fit."""

import csv
import json
from itertools import pairwise
from pathlib import Path

import pytest

from tests.front_door.command_line import call
from twinstream.hardware_profiles.collectives.rank_group import on_one_node
from twinstream.hardware_profiles.collectives.timing import collective_time_ns
from twinstream.models.decoders.rank_share import even_stages, rank_share, table_bytes
from twinstream.models.presets import load_model
from twinstream.options.plan_options import ClusterOptions, PlanOptions
from twinstream.planner.generation import TextGeneration
from twinstream.schedule.errors import TwinstreamError
from twinstream.study.generating import generations
from twinstream.study.generation import PlannedGeneration, PlannedPass

BENCHMARKS = Path(__file__).parents[2] / "docs" / "benchmarks"
NAMES = "card", "tp", "pp", "model", "decode"
ROWS = list(csv.DictReader((BENCHMARKS / "generation.csv").read_text("utf-8").splitlines()))


def planned(
    model: str, machine: str, generation: TextGeneration, device_mem: str | None = None,
    **degrees: int,
) -> PlannedGeneration:  # fmt: skip
    wanted = PlanOptions(model=model, machine=machine, device_mem=device_mem)
    found = generations(generation, wanted, ClusterOptions(**degrees))
    return found[0]


def test_a_token_takes_what_its_bytes_take() -> None:
    """One sequence: all weights are read once a token, and the cache; each at the memory's rate."""
    found = planned("8b", "rtx4090", TextGeneration(1024, 256, 1))
    model = load_model("8b")
    embedding = model.vocab_size * model.d_model * 2
    cache = 32 * 2 * 8 * 128 * 2 * (1024 + 128)
    read = found.weights_bytes - embedding + cache
    assert found.weights_bytes == pytest.approx(2 * 8.03e9, rel=1e-3)
    assert found.cache_bytes == 32 * 2 * 8 * 128 * 2 * (1024 + 256)
    assert read / 1008e9 < found.token_s < 1.25 * read / 1008e9


def test_prompts_take_what_their_flops_take() -> None:
    """2 FLOPs a parameter and token, and the scores, but of the head one row a sequence."""
    found = planned("8b", "h100", TextGeneration(2048, 2, 8))
    model = load_model("8b")
    blocks = 8_030_261_248 - 2 * model.vocab_size * model.d_model
    flops = 8 * 2048 * (2 * blocks + 2 * 2048 * 4096 * 32) + 8 * 2 * 4096 * model.vocab_size
    assert found.prompts.slowest.schedule.model_flops == pytest.approx(flops, rel=1e-3)
    assert 1.0 < found.first_token_s / (flops / 989e12) < 2.0


@pytest.mark.parametrize(
    "row", ROWS, ids=lambda row: "-".join(row[name] for name in NAMES).replace("-1-1-", "-")
)
def test_published_rates_are_met(row: dict[str, str]) -> None:
    """Of one GPU, of tensor parallel ranks (gpt-fast) and of stages (llama.cpp's layers)."""
    generation = TextGeneration(int(row["prompt"]), int(row["decode"]), int(row["batch"]))
    tp, pp = int(row["tp"]), int(row["pp"])
    found = planned(row["model"], row["card"], generation, tp=tp, pp=pp)
    error = found.decode_tokens_per_s / float(row["measured_tokens_per_s"]) - 1
    worst = found.uncertainty.worst
    assert worst is not None
    assert abs(error) <= worst


def test_a_cache_that_does_not_fit_is_kept_on_the_host() -> None:
    """Then a token takes as long as the link needs for what the device has no room for."""
    caps = [None, "2GiB"]
    steps = [planned("llama3.2-1b", "rtx4090", TextGeneration(1024, 16, 24), cap) for cap in caps]
    assert steps[0].cache_bytes == 16 * 2 * 8 * 64 * 2 * (1024 + 16) * 24
    for more, less in pairwise(steps):
        assert less.token_s > more.token_s
        assert less.figures["gap"] < 0.2
    away = steps[0].weights_bytes + steps[0].cache_bytes - 2 * 2**30
    assert steps[-1].token_s > away / 32e9


PROMPTS = list(csv.DictReader((BENCHMARKS / "prompts.csv").read_text("utf-8").splitlines()))


@pytest.mark.parametrize("row", PROMPTS, ids=lambda row: "-".join(row[name] for name in NAMES[:4]))
def test_published_times_to_the_first_token_are_met(row: dict[str, str]) -> None:
    """Of a prompt of 512 tokens that goes through all stages, one behind the other."""
    generation = TextGeneration(int(row["prompt"]), 2, int(row["batch"]))
    tp, pp = int(row["tp"]), int(row["pp"])
    found = planned(row["model"], row["card"], generation, tp=tp, pp=pp)
    error = 512 / found.first_token_s / float(row["measured_tokens_per_s"]) - 1
    assert abs(error) <= 0.24


def test_errors_of_published_rates_are_those_that_are_told() -> None:
    errors: dict[bool, list[float]] = {False: [], True: []}
    for row in ROWS:
        generation = TextGeneration(int(row["prompt"]), int(row["decode"]), int(row["batch"]))
        tp, pp = int(row["tp"]), int(row["pp"])
        found = planned(row["model"], row["card"], generation, tp=tp, pp=pp)
        error = abs(found.decode_tokens_per_s / float(row["measured_tokens_per_s"]) - 1)
        errors[tp * pp > 1].append(error)
    assert [len(found) for found in errors.values()] == [11, 38]
    means = [sum(found) / len(found) for found in errors.values()]
    assert means == pytest.approx([0.1, 0.089], abs=1e-3)
    assert [max(found) for found in errors.values()] == pytest.approx([0.197, 0.197], abs=1e-3)


@pytest.mark.parametrize("name", ["8b", "llama3.2-1b", "qwen3-30b-a3b"])
def test_shares_of_ranks_make_up_the_model(name: str) -> None:
    spec = load_model(name)
    for tp, pp in ((1, 4), (2, 1), (4, 3)):
        stages = even_stages(spec, pp)
        assert [layer for stage in stages for layer in stage] == [*range(spec.num_layers)]
        last = pp - 1
        shares = [
            rank_share(spec, tp, layers, embeds=stage == 0, has_head=stage == last)
            for stage, layers in enumerate(stages)
        ]
        held = tp * sum(share.num_parameters for share in shares) * spec.itemsize
        held += tp * table_bytes(spec, tp) if last else 0
        copied = table_bytes(spec, 1) if last and spec.tied_embeddings else 0
        assert held == pytest.approx(spec.num_parameters * spec.itemsize + copied, rel=2e-3)


def test_ranks_of_tp_read_their_share_and_sum_twice_a_layer() -> None:
    alone = planned("8b", "h100", TextGeneration(512, 64, 4))
    found = planned("8b", "h100", TextGeneration(512, 64, 4), tp=4)
    cluster = found.ranks.cluster
    assert cluster is not None
    told = (("all_reduce", 4 * 4096 * 2, 65), ("all_gather", 4 * 128256 * 4, 1))
    said = sum(
        count * collective_time_ns(cluster, name, size, on_one_node(4)).time_ns
        for name, size, count in told
    )
    assert found.first.communication_s == pytest.approx(said / 1e9, rel=0.05)
    computed = found.first.slowest.step_s
    assert 0.25 * alone.first.slowest.step_s < computed < 0.5 * alone.first.slowest.step_s
    assert found.weights_bytes == pytest.approx(alone.weights_bytes / 4, rel=1e-3)
    assert found.cache_bytes == alone.cache_bytes / 4
    assert found.figures["layout_text"] == "tp4"


def test_stages_have_parts_of_the_sequences_in_turn_and_replicas_have_their_own() -> None:
    one = planned("llama3.2-1b", "rtx4090", TextGeneration(256, 16, 1))
    staged = planned("llama3.2-1b", "rtx4090", TextGeneration(256, 16, 1), pp=2)
    both = planned("llama3.2-1b", "rtx4090", TextGeneration(256, 16, 2), pp=2)
    replicas = planned("llama3.2-1b", "rtx4090", TextGeneration(256, 16, 2), dp=2)
    # a sequence goes through all stages one after the other; two take turns in them
    assert staged.token_s == pytest.approx(one.token_s, rel=0.03)
    assert both.decode_tokens_per_s > 1.6 * staged.decode_tokens_per_s
    assert both.first.parts == 2 and staged.first.parts == 1
    assert replicas.decode_tokens_per_s == 2 * one.decode_tokens_per_s
    assert replicas.first_token_s == one.first_token_s
    two = PlannedPass(both.first.answers, (1.0, 2.0), 0.5, 2)
    assert two.through_s([2.0, 4.0]) == 1 + 2 + 0.5 + 2
    assert two.again_s([2.0, 4.0]) == 4 and two.again_s([2.0, 2.0]) == 2.5


def test_degrees_that_are_open_are_planned_and_what_does_not_fit_is_left_out() -> None:
    asked = ("plan", "8b", "--machine", "rtx4090", "--task", "inference", "--gpus", "2")
    sizes = ("--prompt", "64", "--decode", "8", "--batch", "2", "--device-mem", "12GiB")
    told = call(*asked, *sizes, "--json").json()
    layouts = [told["layout_text"], *(one["layout_text"] for one in told["others"])]
    assert sorted(layouts) == ["pp2", "tp2"]  # dp2 would need 15 GiB a GPU
    assert told["seconds"] <= told["others"][0]["seconds"]
    assert told["device_peak_bytes"] <= 12 * 2**30
    shown = call(*asked, *sizes).out
    assert "others" in shown and "messages" in shown and "2 x rtx4090" in shown


@pytest.mark.parametrize(
    ("generation", "said"),
    [
        ((0, 8, 1), "prompt"),
        ((8, 8, 0), "batch"),
        ((8, 1.5, 1), "decode"),
    ],
)
def test_numbers_that_are_none_are_refused(generation: tuple[int, int, int], said: str) -> None:
    with pytest.raises(TwinstreamError, match=said):
        TextGeneration(*generation)


ASKED = ("plan", "llama3.2-1b", "--machine", "rtx4090", "--task", "inference")


def test_the_command_says_what_python_does() -> None:
    found = planned("llama3.2-1b", "rtx4090", TextGeneration(512, 32, 4))
    asked = (*ASKED, "--prompt", "512", "--decode", "32", "--batch", "4")
    told = call(*asked, "--json").json()
    assert {**told, "plan_seconds": 0, "uncertainty": 0} == {
        **json.loads(json.dumps(found.figures)), "plan_seconds": 0, "uncertainty": 0,
    }  # fmt: skip
    assert told["limits"]["first token"] == ["hbm"]
    shown = call(*asked).out
    assert "first token" in shown and "tokens/s" in shown and "keys and values" in shown


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--prompt", "8"), "needs --decode"),
        (("--prompt", "8", "--decode", "8", "--tokens-per-step", "64"), "--tokens-per-step is of"),
        (("--prompt", "8", "--decode", "8", "--gpus", "2", "--cp", "2"), "--cp is of"),
        (("--prompt", "8", "--decode", "8", "--gpus", "8", "--tp", "3"), "are not --tp x --pp"),
        (("--prompt", "8", "--decode", "8", "--tp", "64"), "num_heads 32, which 64 ranks"),
        (("--prompt", "8", "--decode", "8", "--pp", "64"), "16 layers, fewer than --pp 64"),
        (("--prompt", "8", "--decode", "8", "--dp", "2"), "1 sequences do not divide among 2"),
        (("--prompt", "8", "--decode", "8", "-o", "plan.json"), "--output is of"),
        (("--prompt", "0", "--decode", "8"), "prompt"),
        (("--task", "train", "--prompt", "8"), "--task inference"),
    ],
)
def test_what_is_of_training_is_refused(flags: tuple[str, ...], said: str) -> None:
    found = call(*ASKED, *flags)
    assert found.code == 2 and said in found.err and "Traceback" not in found.err

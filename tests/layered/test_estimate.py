"""Prices on our clusters: memory by hand, the search beside brute force, refusals in one line."""

from itertools import product

import pytest

from tests.front_door.command_line import call, error_of
from twinstream.hardware_profiles.clusters.loader import load_cluster
from twinstream.hardware_profiles.collectives.rank_group import RankGroup
from twinstream.hardware_profiles.collectives.timing import collective_time_ns
from twinstream.layered.estimate import Question, mesh_of
from twinstream.layered.memory import memory_of
from twinstream.layered.step import LayeredTask
from twinstream.layered.strategy import GpuMesh, StrategyError
from twinstream.models.layered.from_decoder import layered_decoder
from twinstream.models.layered.model import LayeredModel, load_layered
from twinstream.models.presets import load_model
from twinstream.models.providers.flops import model_flops_per_sequence

CLUSTER = load_cluster("a100_40gb")
TABLES, ROWS, WIDTH, LOOKUPS, MLP = 64, 100_000, 32, 4, 256
SMALL = {
    "name": "small", "dtype": "float32", "table_dtype": "float16", "products": "tf32",
    "layers": [
        {"kind": "tables", "tables": TABLES, "rows": ROWS, "width": WIDTH, "lookups": LOOKUPS},
        {"kind": "mlp", "name": "bottom", "widths": [MLP, MLP], "repeat": 2},
        {"kind": "mlp", "name": "top", "widths": [MLP, MLP], "repeat": 2, "joins": True},
    ],
}  # fmt: skip
MODEL = LayeredModel.model_validate(SMALL)


def question(gpus: int = 16, batch: int = 4096, model: LayeredModel = MODEL, **task) -> Question:
    return Question(model, CLUSTER, mesh_of(CLUSTER, gpus), LayeredTask(batch, **task))


def test_memory_by_hand():
    """16 GPUs, tables over all, dense layers sharded in a node: of 4 matrices an eighth."""
    batch, dense = 4096, 4 * MLP * MLP
    found = memory_of(
        MODEL,
        {"embedding": ("shard",), "dense": ("fsdp", "ddp")},
        GpuMesh(16, 8),
        LayeredTask(batch),
    )
    table = TABLES * ROWS * WIDTH // 16
    assert found.parameters == 2 * table + 4 * dense // 8
    assert found.gradients == 4 * dense // 8
    assert found.optimizer == 4 * (TABLES * ROWS // 16) + 8 * dense // 8
    pooled = batch // 16 * TABLES * WIDTH
    assert found.activations == 2 * pooled + 4 * 4 * (batch // 16) * MLP
    assert found.buffers == 2 * 4 * MLP * MLP + 2 * 4 * pooled + 2**30
    frozen = LayeredTask(batch, "finetune", frozenset({"embedding"}))
    kept = memory_of(MODEL, {"embedding": ("shard",)}, GpuMesh(16, 8), frozen)
    assert kept.optimizer == 8 * dense


def test_what_is_exchanged_is_priced_as_collectives_are():
    """Pooled vectors of the whole batch, a sixteenth a GPU, there and back; gradients once."""
    step = question().estimate({"embedding": ("shard",), "dense": ("ddp",)}).step
    everyone = RankGroup(ranks=16, ranks_per_node=8)
    pooled = 4096 * TABLES * WIDTH * 2 // 16
    once = collective_time_ns(CLUSTER, "all_to_all", pooled, everyone).time_ns
    assert step.by_kind["all_to_all"] == 2 * once
    gradients = collective_time_ns(CLUSTER, "all_reduce", 4 * MLP * MLP, everyone).time_ns
    assert step.by_kind["all_reduce"] == 4 * gradients


@pytest.mark.parametrize("gpus", [8, 16])
def test_the_search_finds_what_brute_force_does(gpus):
    tables, dense = ["ddp", "shard"], ["ddp", "fsdp", "tp"]
    if gpus > 8:
        tables += [f"{a}/{b}" for a, b in product(tables, tables) if a != b]
        dense += [f"{a}/{b}" for a, b in product(dense, dense) if a != b]
    asked = [question(gpus), question(gpus, recompute=True)]
    every = [
        one.estimate({"embedding": tuple(e.split("/")), "dense": tuple(d.split("/"))})
        for one, e, d in product(asked, tables, dense)
    ]
    steps = sorted(one.step.step_ns for one in every if one.fits)
    found = question(gpus).search({}, most=5)
    assert [one.step.step_ns for one in found] == steps[:5]
    fixed = question(gpus).search({"embedding": ("ddp",)})
    assert {one.strategy["embedding"] for one in fixed} == {("ddp",)}


def test_what_does_not_fit_says_what_it_lacks():
    with pytest.raises(StrategyError, match=r"dlrm_f fits 128 GPUs .* none of 72 .*GiB"):
        question(128, 65536, load_layered("dlrm_f")).search({})


def test_the_command_prints_a_table_and_json(tmp_path):
    asked = ("estimate", "vit_l", "--gpus", "16", "--batch-size", "512")
    found = call(*asked, "--json").json()
    best = found["estimates"][0]
    assert best["fits"] and best["samples_per_s"] == pytest.approx(512 / best["step_s"])
    assert 0 < best["error"] < 0.2 and "published steps" in best["error_is"]
    assert sum(best["memory_bytes"].values()) == 2 * best["memory_bytes"]["total"]
    shown = call(*asked)
    assert best["strategy"] in shown.out and "+/-" in shown.out
    assert "dlrm_a" in call("estimate").out
    file = tmp_path / "mine.toml"
    file.write_text('[[layers]]\nkind = "mlp"\nwidths = [64, 64]\n')
    given = ("estimate", file, "--strategy", "dense=tp", "--as-given", "--json")
    assert call(*given).json()["estimates"][0]["strategy"] == "dense=tp"


@pytest.mark.parametrize(
    "name", ["8b", "tiny", "llama3.2-1b", "qwen3-30b-a3b", "gpt3-175b", "mixtral-8x7b"]
)
def test_a_decoder_has_its_parameters_and_products(name):
    """All but norms and biases; FLOPs of the forward pass to the last one."""
    spec, seq_len = load_model(name), 512
    found = layered_decoder(spec, seq_len)
    assert 0 <= spec.num_parameters - found.parameters < 2e-3 * spec.num_parameters
    router = spec.experts.count if spec.experts else 0
    forward = sum(part.flops for part in found.chain.parts)
    forward += 2 * seq_len * spec.d_model * router * spec.num_layers
    assert forward * 3 == model_flops_per_sequence(spec, seq_len)


def test_classes_of_a_decoder_are_spread_each_their_own_way():
    """Four nodes: whole tables, blocks split in a node and sharded between, a sharded head."""
    spec, seq_len = load_model("8b"), 1024
    ways = {"embedding": ("ddp",), "transformer": ("tp", "fsdp"), "head": ("fsdp",)}
    asked = question(32, 64, layered_decoder(spec, seq_len))
    found = asked.estimate(ways)
    table = spec.vocab_size * spec.d_model
    blocks = spec.num_parameters - 2 * table - (2 * spec.num_layers + 1) * spec.d_model
    assert found.memory.parameters == pytest.approx(2 * (table + table / 32 + blocks / 32))
    in_node = RankGroup(ranks=8, ranks_per_node=8)
    everyone = RankGroup(ranks=32, ranks_per_node=8)
    hidden = 64 // 4 * seq_len * spec.d_model * 2
    sums = collective_time_ns(CLUSTER, "all_reduce", hidden, in_node).time_ns
    rows = collective_time_ns(CLUSTER, "all_reduce", 2 * table, everyone).time_ns
    assert found.step.by_kind["all_reduce"] == pytest.approx(4 * spec.num_layers * sums + rows)
    best = asked.search({"embedding": ("ddp",)})
    assert best[0].step.step_ns <= found.step.step_ns


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["dlrm_x", "--seq-len", "512"], "unknown model 'dlrm_x'"),
        (["deepseek-v3", "--seq-len", "512"], "latent attention"),
        (["dlrm_x"], "unknown layered model 'dlrm_x'"),
        (["no.toml"], "cannot read the model no.toml"),
        (["vit_l", "--gpus", "9"], "no whole nodes of 8"),
        (["vit_l", "--gpus", "80000"], "has at most 560"),
        (["vit_l", "--strategy", "dense=pp"], "known ways"),
        (["vit_l", "--strategy", "dense"], "needs NAME=WAY"),
        (["vit_l", "--strategy", "top=ddp"], "no layer or class"),
        (["vit_l", "--strategy", "dense=tp,dense=ddp"], "twice"),
        (["vit_l", "--strategy", "embedding=fsdp"], "embedding can be ddp, shard"),
        (["vit_l", "--strategy", "dense=shard"], "transformer can be ddp, fsdp, tp"),
        (["vit_l", "--strategy", "dense=tp/ddp"], "give one way"),
        (["vit_l", "--gpus", "16", "--strategy", "dense=tp/tp"], "two that differ"),
        (["vit_l", "--batch-size", "17", "--as-given"], "17 samples does not divide over the 8"),
        (["vit_l", "--gpus", "32", "--strategy", "dense=tp"], "16 heads of transformer"),
        (["dlrm_a_experts", "--gpus", "32", "--strategy", "top=tp"], "16 experts of top"),
        (["vit_l", "--task", "serve"], "--task 'serve' is unknown"),
        (["vit_l", "--freeze", "embedding"], "is of --task finetune"),
        (["vit_l", "--task", "finetune"], "needs --freeze"),
        (["vit_l", "--task", "finetune", "--freeze", "top"], "--freeze top"),
        (["vit_l", "--task", "finetune", "--freeze", "embedding", "--freeze", "transformer"],
         "everything is frozen"),
        (["vit_l", "--cluster", "h1000"], "h100"),
    ],
)  # fmt: skip
def test_wrong_inputs_are_one_line(arguments, told):
    message = error_of("estimate", *arguments)
    assert told in message and message.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("layers = 3", "layers"),
        ("[[layers]]\nkind = 'mlp'\nwidths = [4]", "widths"),
        ("[[layers]]\nkind = 'mlp'\nwidths = [4, 8]\nrepeat = 2", "equal widths"),
        ("[[layers]]\nkind = 'conv'", "conv"),
        ("[[layers]]\nkind = 'tokens'\nvocab = 9\nwidth = 4\nseq_len = 2", "no layer after"),
        ("[[layers]]\nkind = 'mlp'\nwidths = [4, 4]\n[[layers]]\nkind = 'tables'\ntables = 1\n"
         "rows = 1\nwidth = 4\nlookups = 1", "come first"),
        ("dtype = 'float8'\n[[layers]]\nkind = 'mlp'\nwidths = [4, 4]", "dtype"),
        ("[[layers]]\nkind = 'transformer'\nlayers = 1\nheads = 3\nwidth = 4\nffn = 4\n"
         "seq_len = 2", "not divisible"),
        ("[[layers]", "cannot read"),
    ],
)  # fmt: skip
def test_wrong_files_are_one_line(tmp_path, text, told):
    file = tmp_path / "model.toml"
    file.write_text(text)
    message = error_of("estimate", file)
    assert told in message and str(file) in message and message.count("\n") == 1

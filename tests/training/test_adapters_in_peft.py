"""What is trained is what PEFT loads: its loss, of every family, by our kernels and by own code."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.training.small_runs import options, state_files, trained, write_rows
from twinstream.executor.weights.merging import export_adapter

peft = pytest.importorskip("peft")

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 128, "head_dim": 16,
    "initializer_range": 0.1,
}  # fmt: skip
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED = MOE | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "num_key_value_heads": 4, "n_group": 2, "topk_group": 1, "head_dim": 8,
}  # fmt: skip
QWEN3 = {"model_type": "qwen3_moe", "num_experts": 4, "norm_topk_prob": True, **MOE}
MODELS: dict[str, dict[str, object]] = {
    "llama": {"model_type": "llama"},
    "gemma3": {"model_type": "gemma3_text"},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": QWEN3,
    "qwen3_moe with a dense layer": QWEN3 | {"mlp_only_layers": [0]},
    "qwen2_moe": {
        "model_type": "qwen2_moe", "num_experts": 4, "shared_expert_intermediate_size": 48, **MOE,
    },
    "olmoe": {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2},
    "dots1": {"model_type": "dots1", **SHARED},
    "glm4_moe": {"model_type": "glm4_moe", "partial_rotary_factor": 1.0, **SHARED},
    "glm4_moe by its own code": {"model_type": "glm4_moe", **SHARED},
    "deepseek_v3 by its own code": {"model_type": "deepseek_v3", **SHARED, **LATENT},
}  # fmt: skip
WHOLE = "r=4,save=embed_tokens,lm_head"
EVERYTHING = "r=4,rslora,targets=q,k,v,o,gate,up,down,experts"


@pytest.mark.parametrize(
    ("name", "lora"),
    [(name, "r=4") for name in MODELS]
    + [("llama", WHOLE), ("dots1", "r=4,targets=q,experts,save=lm_head")]
    + [(name, EVERYTHING) for name in ("qwen3_moe with a dense layer", "dots1", "qwen2_moe")],
)
def test_peft_computes_what_was_trained(name: str, lora: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(**(SIZES | MODELS[name]))
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "base")
    held_out = write_rows(tmp_path / "held_out.jsonl", 4)
    run = options(
        tmp_path, model=str(tmp_path / "base"), steps=2, lora=lora, eval_data=(str(held_out),),
        dtype="float32",
    )  # fmt: skip
    result, seen = trained(run)
    assert result.model is not None
    assert seen.evals[-1].loss < seen.losses[0] - 0.05  # the adapter counts
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, result.model).eval()
    assert seen.evals[-1].loss == pytest.approx(_loss(theirs, held_out), abs=1e-5)


def test_what_is_trained_whole_is_gone_on_with_and_merged(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(**(SIZES | MODELS["llama"]))
    base = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    base.save_pretrained(tmp_path / "base")
    held_out = write_rows(tmp_path / "held_out.jsonl", 4)
    given = {"model": str(tmp_path / "base"), "eval_data": (str(held_out),), "dtype": "float32"}
    first, seen = trained(options(tmp_path / "a", lora=WHOLE, **given))
    assert first.model is not None
    again = options(tmp_path / "b", lora=WHOLE, policy="streaming", **given)
    stopped, some = trained(again, stop_after=3)
    result, rest = trained(again, resume=True)
    assert some.losses[: stopped.step] + rest.losses == seen.losses
    assert state_files(result.folder, 6) == state_files(first.folder, 6)
    _, more = trained(options(tmp_path / "c", adapter=first.model, steps=1, **given))
    assert more.losses[0] < seen.losses[-1] + 0.3 < seen.losses[0]
    export_adapter(first.model, tmp_path / "merged", None, merge=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert seen.evals[-1].loss == pytest.approx(_loss(merged, held_out), abs=1e-5)
    assert torch.equal(merged.model.norm.weight, base.model.norm.weight)
    for name in ("lm_head", "model.embed_tokens"):
        before, after = (each.get_submodule(name).weight for each in (base, merged))
        assert not torch.equal(before, after)


def _loss(model: torch.nn.Module, rows: Path) -> float:
    """The mean over all bytes but the first of each document."""
    total = count = 0.0
    for line in rows.read_text().splitlines():
        ids = torch.tensor([list(json.loads(line)["text"].encode())])
        for part in ids.split(64, 1):
            if part.shape[1] > 1:
                found = model(input_ids=part, labels=part).loss.item()
                total, count = total + found * (part.shape[1] - 1), count + part.shape[1] - 1
    return total / count

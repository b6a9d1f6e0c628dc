"""Tiny random models of each family, as Hugging Face modules and as flat parameters."""

from dataclasses import dataclass

import torch
from transformers import (
    Dots1Config,
    Dots1ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.executor.kernels.driver import LLAMA_3_1, Step
from tests.helpers.hf_weights import pack_hf_state, unpack_hf_state
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.options import Experts

SEQ_LEN, NUM_SEQUENCES = 24, 4
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
EXPERT_FAMILIES = {
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "olmoe": (OlmoeConfig, OlmoeForCausalLM),
    "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "dots1": (Dots1Config, Dots1ForCausalLM),
    "glm4_moe": (Glm4MoeConfig, Glm4MoeForCausalLM),
}
EXPERTS = {
    "mixtral": Experts(count=4, per_token=2, d_ff=80),
    "olmoe": Experts(count=8, per_token=3, d_ff=80, normalized=False),
    "qwen2_moe": Experts(
        count=6, per_token=2, d_ff=24, shared_d_ff=40, shared_gate=True, normalized=False,
        dense_layers=(1,),
    ),
    "qwen3_moe": Experts(count=8, per_token=3, d_ff=24),
    "dots1": Experts(
        count=8, per_token=2, d_ff=24, shared_d_ff=48, scores="sigmoid", correction_bias=True,
        num_groups=4, groups_per_token=2, scale=1.7, dense_layers=(0,),
    ),
    "glm4_moe": Experts(
        count=8, per_token=2, d_ff=24, shared_d_ff=24, scores="sigmoid", correction_bias=True,
        num_groups=2, groups_per_token=1, dense_layers=(0,),
    ),
}  # fmt: skip
# As of Llama 3.1; of the six frequencies one stays, one is in between, four are divided.
STRETCHED = LLAMA_3_1.model_copy(update={"original_max_position_embeddings": 64})


def tiny_spec(family: str, dtype: str = "float32") -> ModelSpec:
    return ModelSpec(
        name=family,
        num_layers=2,
        d_model=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16 if family in ("qwen3", "qwen3_moe", "dots1") else 12,
        d_ff=80,
        vocab_size=97,
        norm_eps=1e-5,
        rope_theta=10_000.0,
        rope_scaling=STRETCHED if family == "llama" else None,
        qk_norm=family in ("qwen3", "qwen3_moe", "olmoe", "dots1"),
        qk_norm_rows=family == "olmoe",
        qkv_bias=family in ("qwen2", "qwen2_moe"),
        tied_embeddings=family == "qwen3",
        dtype=dtype,
        experts=EXPERTS.get(family),
    )


def rope_parameters(spec: ModelSpec) -> dict[str, object]:
    """As transformers takes them."""
    scaling = spec.rope_scaling
    if spec.name == "glm4_moe":  # its own is a half
        return {"rope_type": "default", "rope_theta": spec.rope_theta, "partial_rotary_factor": 1.0}
    if scaling is None:
        return {"rope_type": "default", "rope_theta": spec.rope_theta}
    return {"rope_type": "llama3", "rope_theta": spec.rope_theta, **scaling.model_dump()}


def hf_model(spec: ModelSpec, seed: int = 0) -> PreTrainedModel:
    """In float32, with weights that bf16 holds exactly, so that both dtypes have the same."""
    config_class, model_class = (FAMILIES | EXPERT_FAMILIES)[spec.name]
    has_none = ("qwen2", "qwen2_moe", "olmoe")
    options = {} if spec.name in has_none else {"head_dim": spec.head_dim}
    config = config_class(
        vocab_size=spec.vocab_size,
        hidden_size=spec.d_model,
        intermediate_size=spec.d_ff,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        rms_norm_eps=spec.norm_eps,
        rope_parameters=rope_parameters(spec),
        tie_word_embeddings=spec.tied_embeddings,
        attn_implementation="eager",
        pad_token_id=None,  # whose embedding would have no gradient
        eos_token_id=None,
        **options,
        **expert_options(spec),
    )
    model = model_class(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            value = 1 + 0.2 * noise if parameter.dim() == 1 else 0.15 * noise
            parameter.copy_(value.bfloat16())
        for name, tensor in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
    return model


def expert_options(spec: ModelSpec) -> dict[str, object]:
    """What a config of transformers says of experts."""
    experts = spec.experts
    if experts is None:
        return {}
    found = {"num_experts_per_tok": experts.per_token, "moe_intermediate_size": experts.d_ff,
             "norm_topk_prob": experts.normalized}  # fmt: skip
    if spec.name in ("dots1", "glm4_moe"):
        return found | {
            "n_routed_experts": experts.count, "n_group": experts.num_groups,
            "n_shared_experts": experts.shared_d_ff // experts.d_ff,
            "topk_group": experts.groups_per_token, "routed_scaling_factor": experts.scale,
            "first_k_dense_replace": len(experts.dense_layers), "sliding_window": None,
        }  # fmt: skip
    if spec.name == "mixtral":
        return found | {"num_local_experts": experts.count}
    found |= {"num_experts": experts.count, "mlp_only_layers": list(experts.dense_layers)}
    if spec.name == "qwen2_moe":
        found["shared_expert_intermediate_size"] = experts.shared_d_ff
    return found


def random_tokens(
    spec: ModelSpec, seed: int = 1, num_sequences: int = NUM_SEQUENCES
) -> torch.Tensor:
    """Ids and labels, [2, tokens]: the next id, and nothing at the end of each sequence.

    Some ids are frequent, so that embedding gradients sum over several tokens of a chunk.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, spec.vocab_size, (num_sequences, SEQ_LEN), generator=generator)
    ids[torch.rand(ids.shape, generator=generator) < 0.3] = 5
    labels = torch.full_like(ids, -100)
    labels[:, :-1] = ids[:, 1:]
    labels[1, 3:9] = -100
    return torch.stack((ids.flatten(), labels.flatten()))


@dataclass(frozen=True)
class LossAndGradients:
    loss: float
    gradients: dict[str, torch.Tensor]

    def errors(self, reference: "LossAndGradients") -> dict[str, float]:
        """max |a - b| / max |b| of the loss and of every gradient."""
        assert self.gradients.keys() == reference.gradients.keys()
        errors = {"loss": abs(self.loss - reference.loss) / abs(reference.loss)}
        for name, expected in reference.gradients.items():
            assert self.gradients[name].isfinite().all(), name
            difference = (self.gradients[name].float() - expected.float()).abs().max()
            errors[name] = float(difference / expected.float().abs().max())
        return errors


def loss_scale(tokens: torch.Tensor) -> float:
    return 1.0 / int((tokens[1] >= 0).sum())


def hf_step(model: PreTrainedModel, tokens: torch.Tensor) -> LossAndGradients:
    ids, labels = tokens.view(2, -1, SEQ_LEN)
    model.zero_grad()
    logits = model(input_ids=ids).logits
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="sum"
    )
    loss = losses * loss_scale(tokens)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return LossAndGradients(loss.item(), gradients)


def kernel_step(spec: ModelSpec, tokens: torch.Tensor, chunk_tokens: int, **options) -> Step:
    """A step of the kernels on the same weights, not run yet."""
    parameters = pack_hf_state(spec, hf_model(spec).state_dict())
    return Step(spec, parameters, tokens, chunk_tokens, SEQ_LEN, loss_scale(tokens), **options)


def result_of(step: Step) -> LossAndGradients:
    loss = step.run()
    flats = {name: flat.cpu() for name, flat in step.gradients.items()}
    return LossAndGradients(loss.item(), unpack_hf_state(step.spec, flats))

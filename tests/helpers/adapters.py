"""Flat parameters as plain torch trains them: modules of transformers, with LoRA beside them."""

from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from tests.helpers.hf_weights import pack_hf_state
from tests.helpers.plans import MACHINE, planned
from twinstream.executor.kernels.operand import DTYPES
from twinstream.executor.program.options import RunOptions
from twinstream.executor.run.execute import execute
from twinstream.executor.run.training import Training
from twinstream.executor.state.training_state import State, adapter_state, fresh_optimizer_state
from twinstream.models.decoders.hf_weights import hf_weights_of
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.lowering.lower import lower
from twinstream.models.providers.trained import trained_groups
from twinstream.models.recipes.lora import Lora
from twinstream.models.recipes.peft_weights import peft_weights
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.document import Caps
from twinstream.schedule.workload import Workload


class LoraLinear(torch.nn.Module):
    """As the paper has it; the base takes no gradient."""

    def __init__(self, base: torch.nn.Linear, a: torch.Tensor, b: torch.Tensor, scale: float):
        super().__init__()
        self.base, self.scale = base, scale
        self.a, self.b = torch.nn.Parameter(a.clone()), torch.nn.Parameter(b.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.scale * (x @ self.a.T) @ self.b.T


def state_of(spec: ModelSpec, model: PreTrainedModel, recipe: Recipe, seed: int = 3) -> State:
    """A run's state with the weights of a model, and adapters whose B is not zero."""
    flats = pack_hf_state(spec, model.state_dict())
    state = {f"param.{name.removeprefix('layer.')}": flat for name, flat in flats.items()}
    for group in trained_groups(spec, recipe):
        if (flat := state.get(f"param.{group}")) is not None:
            state[f"opt.{group}"] = fresh_optimizer_state(spec, group, flat, recipe)
    state |= adapter_state(spec, seed, recipe)
    generator = torch.Generator().manual_seed(seed)
    if recipe.lora is not None:
        for name, view in adapter_views(spec, recipe.lora, state).items():
            if "lora_B" in name:
                view.copy_(0.05 * torch.randn(view.shape, generator=generator))
    return state


def adapter_views(
    spec: ModelSpec, lora: Lora, state: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The adapters of a state under PEFT's names."""
    return {
        weight.name: state[f"param.{weight.group}"][weight.offset_bytes : weight.end_bytes]
        .view(DTYPES[spec.dtype])
        .view(weight.shape)
        for weight in peft_weights(spec, lora)
    }


def add_adapters(
    model: PreTrainedModel, spec: ModelSpec, lora: Lora, state: Mapping[str, torch.Tensor]
) -> dict[str, torch.nn.Parameter]:
    """Put a state's adapters beside a model's projections; its parameters that train, by name."""
    model.requires_grad_(requires_grad=False)
    views, found = adapter_views(spec, lora, state), {}
    for name, a in views.items():
        if "lora_A" not in name:
            continue
        path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        b_name = name.replace("lora_A", "lora_B")
        module = LoraLinear(model.get_submodule(path), a, views[b_name], lora.scale)
        parent, _, child = path.rpartition(".")
        setattr(model.get_submodule(parent), child, module)
        found |= {name: module.a, b_name: module.b}
    return found


def loss_here(
    spec: ModelSpec, lora: Lora, state: State, ids: torch.Tensor, labels: torch.Tensor
) -> float:
    """Of our own forward pass of two sequences."""
    tokens, seq_len = torch.stack((ids.flatten(), labels.flatten())).int(), ids.shape[1]
    workload = Workload(
        seq_len=seq_len, chunk_tokens=ids.numel(), chunks_per_round=1, rounds_per_step=1
    )
    schedule = planned(lower(spec, workload, Recipe(lora=lora)), MACHINE, Caps(), "resident")
    run = Training(lambda step, index: tokens, 0.0, seed=0)
    execute(schedule, state, run.host_work(schedule), RunOptions(num_passes=1))
    return run.losses[0]


def freeze(model: PreTrainedModel, spec: ModelSpec, groups: tuple[str, ...]) -> None:
    """Let groups of a model's parameters take no gradient."""
    parameters = dict(model.named_parameters())
    for group in groups:
        for weight in hf_weights_of(spec, group):
            parameters[weight.name].requires_grad_(requires_grad=False)


def torch_losses(
    model: PreTrainedModel, tokens: torch.Tensor, recipe: Recipe, learning_rate: float
) -> list[float]:
    """Of AdamW steps; tokens are [step, 2, sequence, token]: ids, then labels."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": recipe.weight_decay},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]
    betas = (recipe.beta1, recipe.beta2)
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=recipe.eps)
    losses = []
    for ids, labels in tokens.long():
        optimizer.zero_grad()
        logits = model(input_ids=ids).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, labels.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses

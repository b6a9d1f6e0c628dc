"""A real model of a config, and one step of it block by block: losses, gradients, costs."""

import json
from dataclasses import dataclass, field

import torch
from torch import nn

from twinstream.executor.modules.building import with_floats
from twinstream.executor.modules.calling import run_module
from twinstream.executor.modules.module_program import ModuleProgram
from twinstream.executor.modules.rows_and_values import restored, row_loss, stored
from twinstream.executor.modules.tracing import count_task
from twinstream.models.providers.traced import ModuleSource, TracedModel
from twinstream.models.providers.traced_parts import TracedTask

BATCH, SEQ_LEN = 2, 32


def real_model(source: ModuleSource) -> nn.Module:
    """As transformers makes it, on the CPU in float32, with weights off their symmetric start."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = json.loads(json.dumps(source.config), object_hook=with_floats)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[config["model_type"]].from_dict(config), dtype=torch.float32
    ).train()
    for part in model.modules():
        if hasattr(part, "config"):
            part.config.use_cache = False
    if getattr(model, "_can_set_experts_implementation", bool)():
        model.set_experts_implementation("grouped_mm")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.02)
    return model


@dataclass
class Step:
    """What a step gave, and each task's (what, FLOPs agree, traced peak / real peak)."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    tasks: list[tuple[str, bool, float]] = field(default_factory=list)

    def add(self, gradients: dict[str, torch.Tensor | None]) -> None:
        add(self.gradients, gradients)


def add(into: dict[str, torch.Tensor], more: dict[str, torch.Tensor | None]) -> None:
    for name, gradient in more.items():
        if gradient is not None:
            into[name] = into[name] + gradient if name in into else gradient


def chunk_of(model: TracedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and shifted labels, one row's last ignored."""
    random = torch.Generator().manual_seed(1)
    size = (BATCH, SEQ_LEN)
    ids = torch.randint(2, model.vocab_size, size, generator=random)
    labels = torch.randint(0, model.vocab_size, size, generator=random, dtype=torch.int32)
    labels[:, -1] = -1
    return ids, labels


def whole_step(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> Step:
    """The model's own backward."""
    loss = row_loss(run_module(model, {"input_ids": ids}), labels, 1 / ids.numel())
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return Step(loss.detach(), gradients)


def block_step(
    traced: TracedModel, model: nn.Module, ids: torch.Tensor, labels: torch.Tensor
) -> Step:
    """Prelude and blocks without autograd, the postlude, and blocks again under autograd."""
    size = (BATCH, SEQ_LEN)
    chunk = ModuleProgram(traced).at(*size)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    batch = {"input_ids": ids}
    step = Step(torch.zeros(()), {})

    def of(groups):
        return {t.name: weights[t.name] for name in groups for t in traced.group(name).tensors}

    def run(what, task: TracedTask, task_size, given, compute):
        with torch.no_grad():
            cost, result = count_task(given, compute)
        flops, peak = task.flops(*task_size), task.peak_bytes.at(*task_size)
        step.tasks.append((what, flops == cost.flops, peak / max(1, cost.peak_bytes)))
        return result

    values: dict[str, torch.Tensor] = {}

    def keep(names, made):
        for name, tensor in zip(names, made, strict=True):
            value = traced.value(name)
            assert tuple(tensor.shape) == value.shape_at(*size), name
            kept = stored(value, tensor)
            assert tuple(kept.shape) == value.stored_shape_at(*size), name
            values[name] = restored(value, kept, size)

    prelude, postlude = traced.prelude, traced.postlude
    used = of(prelude.groups)
    given = (used, batch)
    keep(
        prelude.outputs,
        run("prelude", prelude.forward, size, given, lambda: chunk.prelude(used, batch)),
    )
    for index, call in enumerate(traced.calls):
        used, inputs = of(call.groups), [values[name] for name in call.inputs]
        task = traced.kinds[call.kind].forward
        made = run(
            f"block {index}",
            task,
            size,
            (used, inputs),
            lambda i=index, u=used, x=inputs: chunk.block(i, u, x),
        )
        keep(call.outputs, made)
    batches, found = chunk.batches, [values[name] for name in postlude.inputs]
    rows = [batches.flat(value, batches.row_axis(tuple(value.shape), size)) for value in found]
    used = of(postlude.groups)
    step.loss, of_inputs, of_weights = run(
        "postlude",
        postlude.training,
        (1, ids.numel()),
        (used, rows, labels),
        lambda: chunk.postlude_backward(used, rows, labels, 1 / ids.numel()),
    )
    step.add(of_weights)
    flowing: dict[str, torch.Tensor] = {}

    def flow(names, gradients):
        shaped = [
            g if g is None else g.reshape(values[n].shape)
            for n, g in zip(names, gradients, strict=True)
        ]
        add(flowing, dict(zip(names, shaped, strict=True)))

    flow(postlude.inputs, of_inputs)
    for index, call in reversed(list(enumerate(traced.calls))):
        used, inputs = of(call.groups), [values[name] for name in call.inputs]
        seeds = [flowing.get(name) for name in call.outputs]
        of_inputs, of_weights = run(
            f"backward of block {index}",
            traced.kinds[call.kind].backward,
            size,
            (used, inputs, seeds),
            lambda i=index, u=used, x=inputs, g=seeds: chunk.block_backward(i, u, x, g),
        )
        flow(call.inputs, of_inputs)
        step.add(of_weights)
    used = of(prelude.groups)
    seeds = [flowing.get(name) for name in prelude.outputs]
    step.add(chunk.prelude_backward(used, batch, seeds))
    return step


def wrong_gradients(whole: Step, blocks: Step) -> dict[str, float]:
    """Parameters whose gradient is not the same bit for bit, with the relative error."""
    wrong = {}
    for name in whole.gradients.keys() | blocks.gradients.keys():
        one, other = whole.gradients.get(name), blocks.gradients.get(name)
        if one is None or other is None:
            there = one if other is None else other
            if there is not None and bool(there.any()):
                wrong[name] = 1.0
        elif not torch.equal(one, other):
            wrong[name] = float((one - other).abs().max() / one.abs().max())
    return wrong

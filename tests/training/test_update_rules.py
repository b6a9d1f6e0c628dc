"""Rules of updates beside AdamW: torch's own numbers, the same bits under any plan, on ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.executor.weights.small_models import random_model, save
from tests.front_door.command_line import call, error_of
from tests.training.ranks.rank_runs import STEPS, one_device, rank_options
from tests.training.small_runs import Seen, options, same_bits_after_a_stop, state_files, trained
from tests.training.test_against_torch import NUM_STEPS, summed_loss, wanted_options
from twinstream.executor.kernels.updates.muon_step import orthogonalised
from twinstream.models.lowering.declarations import muon_matrices, optimizer_parts, part_state_bytes
from twinstream.models.presets import load_model
from twinstream.models.recipe import Recipe
from twinstream.models.update_rules import OwnRule, UpdateRuleError, update_rule
from twinstream.schedule.errors import TwinstreamError
from twinstream.training.preparing import Prepared
from twinstream.training.run.steps import StepBatches
from twinstream.training.trainer import Trainer

OWN = """
def signum(parameter, gradient, state, step):
    state[0].mul_(0.9).add_(gradient * 0.1)
    parameter.sub_(state[0].sign() * step.learning_rate)


def two(parameter, gradient, state, step):
    state[0].mul_(0.9).add_(gradient)
    state[1].mul_(0.99).add_(gradient * gradient)
    parameter.sub_(state[0] / (state[1].sqrt() + 1e-6) * step.learning_rate)


def mixes(parameter, gradient, state, step):
    state[0].add_(gradient)
    parameter.sub_(gradient / gradient.norm())


def forgets(parameter, gradient, state, step):
    parameter.sub_(gradient)


def fails(parameter, gradient, state, step):
    parameter.sub_(nothing)


def of_two(parameter, gradient):
    parameter.sub_(gradient)


def second(parameter, gradient, state, step):
    state[1].add_(gradient)


nothing_to_call = 3
"""


class Lion(torch.optim.Optimizer):
    """Algorithm 2 of arXiv:2302.06675."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.0, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                m = self.state[parameter].setdefault("m", torch.zeros_like(parameter))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(group["lr"] * (0.9 * m + 0.1 * parameter.grad).sign())
                m.mul_(0.99).add_(parameter.grad, alpha=0.01)


def optimizers(optim: str, model: torch.nn.Module, decay: float) -> list[torch.optim.Optimizer]:
    named = dict(model.named_parameters())
    matrices = [p for name, p in named.items() if p.dim() > 1 and "layers" in name]
    tables = [p for name, p in named.items() if p.dim() > 1 and "layers" not in name]
    vectors = [p for p in named.values() if p.dim() == 1]
    groups = [{"params": matrices + tables, "weight_decay": decay}, {"params": vectors}]
    if optim == "sgd":
        return [torch.optim.SGD([*matrices, *tables, *vectors], lr=0.0, momentum=0.9)]
    if optim == "lion":
        return [Lion(groups)]
    others = [{"params": tables, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    return [
        torch.optim.Muon(
            matrices, momentum=0.95, weight_decay=decay, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, betas=(0.95, 0.95), eps=1e-8),
    ]  # fmt: skip


def reference(prepared: Prepared, model: torch.nn.Module) -> list[float]:
    plan, opts = prepared.plan, prepared.options
    batches = StepBatches(
        plan.chunks(prepared.data, opts.seed), plan.chunks_per_step, 1, plan.pieces
    )
    used = optimizers(opts.optim, model, opts.weight_decay)
    losses = []
    for step in range(1, NUM_STEPS + 1):
        for one in used:
            one.zero_grad()
            for group in one.param_groups:
                group["lr"] = prepared.rate(step)
        found = batches.step(step)
        loss = sum(summed_loss(model, chunk) for chunk in found.chunks) / found.targets
        loss.backward()
        losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), opts.max_grad_norm)
        for one in used:
            one.step()
    return losses


@pytest.mark.parametrize(
    ("optim", "rate", "decay", "error"),
    [("sgd", 0.1, 0.0, 1e-5), ("lion", 1e-3, 0.1, 1e-5), ("muon", 3e-3, 0.1, 2e-3)],
)
def test_twenty_steps_are_those_of_plain_torch(
    tmp_path: Path, optim: str, rate: float, decay: float, error: float
) -> None:
    """Of Muon the iteration in bf16 rounds otherwise where Q, K and V lie in one tensor."""
    model = random_model("llama", torch.float32)
    save(model, tmp_path / "model")
    seen, given = Seen(), {"optim": optim, "beta2": None, "learning_rate": rate}
    wanted = wanted_options(tmp_path, tmp_path / "model", "packed")
    wanted = wanted.model_copy(update=given | {"weight_decay": decay})
    trainer = Trainer(wanted, callbacks=[seen])
    losses = reference(trainer.prepare(), model)
    trainer.train()
    assert seen.losses[-1] < seen.losses[0]
    assert seen.losses == pytest.approx(losses, abs=error)


@pytest.mark.parametrize("optim", ["sgd", "lion", "muon", "own"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_goes_on_to_the_same_bits_under_another_policy(
    tmp_path: Path, optim: str, dtype: str
) -> None:
    if optim == "own":
        (tmp_path / "own.py").write_text(OWN)
        optim = f"{tmp_path}/own.py:two,states=2"
    again = {"policy": "streaming", "host_mem": "1GiB"}
    rate = 0.3 if optim == "sgd" else 3e-3
    same_bits_after_a_stop(tmp_path, again, optim=optim, dtype=dtype, learning_rate=rate)


@pytest.mark.parametrize(
    ("optim", "layout"),
    [("lion", {"pp": 2}), ("muon", {"pp": 2}), ("sgd", {"pp": 1, "dp": 2, "zero": 1})],
)
def test_ranks_have_the_bits_of_one_device_and_shards_those_of_whole_replicas(
    tmp_path: Path, optim: str, layout: dict[str, Any]
) -> None:
    if "dp" in layout:
        whole, _ = trained(rank_options(tmp_path / "one", ranks=2, optim=optim, dp=2, zero=0))
        state = state_files(whole.folder, STEPS)
    else:
        state, _ = one_device(tmp_path / "one", optim=optim)
    result, _ = trained(rank_options(tmp_path / "several", ranks=2, optim=optim, **layout))
    assert state_files(result.folder, STEPS) == state


def test_the_planner_knows_the_state_of_each_rule() -> None:
    spec = load_model("tiny")
    sizes = {}
    for rule in ("adamw", "sgd", "lion", "muon"):
        recipe = Recipe(update=rule)
        sizes[rule] = {
            group: sum(part_state_bytes(spec, group, part, recipe)
                       for part in optimizer_parts(spec, group, recipe))
            for group in spec.parameter_groups
        }  # fmt: skip
    whole = {group: spec.group_layout(group).size_bytes for group in spec.parameter_groups}
    assert sizes["adamw"] == {group: 2 * size for group, size in whole.items()}
    assert sizes["sgd"] == sizes["lion"] == whole
    assert sizes["muon"]["embedding"] == 2 * whole["embedding"]
    matrices = muon_matrices(spec, "0", Recipe(update="muon"))
    assert len(matrices) == 7  # q, k, v, o, gate, up, down
    inside = sum(rows * columns for _, rows, columns in matrices) * spec.itemsize
    assert sizes["muon"]["0"] == 2 * whole["0"] - inside
    told = {
        optim: call(
            "plan", "--model", "1b", "--seq-len", 2048, "--tokens-per-step", 65536, "--machine",
            "rtx4090", "--optim", optim, "--json",
        ).json()["tokens_per_s"]
        for optim in ("adamw", "lion")
    }  # fmt: skip
    assert told["lion"] > told["adamw"]  # a third less to move


def test_a_matrix_comes_out_nearly_orthogonal_whatever_its_shape() -> None:
    for shape in ((48, 16), (16, 48), (32, 32)):
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        values = torch.linalg.svdvals(orthogonalised(matrix).float())
        assert float(values.max()) < 1.3 and float(values.min()) > 0.3


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ("mixes", "mixes elements"),
        ("forgets", "leaves state[0] as it was"),
        ("fails", "fails with NameError"),
        ("of_two", "fails with TypeError"),
        ("second", "fails with IndexError"),
        ("nothing_to_call", "fails with TypeError: 'int' object is not callable"),
    ],
)
def test_a_rule_of_your_own_is_tried_before_the_run(tmp_path: Path, rule: str, says: str) -> None:
    (tmp_path / "own.py").write_text(OWN)
    optim = f"{tmp_path}/own.py:{rule}"
    with pytest.raises(TwinstreamError, match=says.replace("[", r"\[")):
        Trainer(options(tmp_path, optim=optim)).prepare()
    step = ("--model", "tiny", "--machine", "cpu", "--seq-len", 64, "--tokens-per-step", 64)
    plan = tmp_path / "plan.json"
    assert call("plan", *step, "--optim", optim, "-o", plan).code == 0
    assert says in " ".join(error_of("run", plan, "--backend", "cpu").split())


def test_what_no_rule_can_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    own = update_rule(f"{tmp_path}/own.py:two,states=2")
    assert isinstance(own, OwnRule) and own.num_states == 2
    for wrong in ("adam", "own.py", f"{tmp_path}/own.py:two,states=9", f"{tmp_path}/own.py:a,b"):
        with pytest.raises(UpdateRuleError):
            update_rule(wrong)
    step = ("--model", "tiny", "--machine", "cpu", "--seq-len", 64, "--tokens-per-step", 256)
    said = error_of("plan", *step, "--optim", "lion", "--optimizer-state", "8bit")
    assert "Lion keeps its state in the model's dtype" in said
    with pytest.raises(TwinstreamError, match="Muon, whose matrices are whole, sharded by ZeRO"):
        Trainer(
            rank_options(tmp_path, ranks=2, dp=2, zero=1, optim="muon")
        ).prepare()  # fmt: skip

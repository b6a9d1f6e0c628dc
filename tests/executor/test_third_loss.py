"""A third loss is a class with its kernels: options, documents, plans and runs find it by name."""

from dataclasses import replace
from typing import Annotated

import pytest
import torch
from pydantic import Field

from tests.front_door.command_line import call
from tests.helpers.plans import MACHINE
from tests.helpers.tiny_chains import small
from twinstream.executor.kernels import registry
from twinstream.executor.kernels.head_forward import HeadForward
from twinstream.executor.kernels.head_loss import add_gradients
from twinstream.executor.program.options import RunOptions
from twinstream.executor.run.execute import execute
from twinstream.executor.run.training import Training
from twinstream.executor.state.training_state import initial_state
from twinstream.models.kernel_costs import workspace
from twinstream.models.kernel_costs.scratch.end_scratch import head_loss
from twinstream.models.kernel_costs.scratch_sizes import float32_bytes
from twinstream.models.loss import LOSSES, CrossEntropy, Loss, loss_of
from twinstream.models.recipes.recipe import KernelChoice, Recipe
from twinstream.planner.planner import Planner
from twinstream.planner.request import PlanRequest, TrainingStep
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.ops import Attribute
from twinstream.schedule.workload import Workload
from twinstream.simulator.replay import steady_state


class Weighted(CrossEntropy):
    """Cross entropy, so many times."""

    name = "weighted"
    kernel = evaluation_kernel = "head_weighted"
    weight: Annotated[float, Field(gt=0)] = 1.0

    def attributes(self, workload: Workload) -> dict[str, Attribute]:
        return {"loss_weight": self.weight}


def head_weighted(operands, attributes, vector, calls) -> None:
    head = HeadForward.of(operands, attributes)
    scale = head.workspace.take((1,), torch.float32)
    calls.add(torch.mul, head.loss_scale, attributes["loss_weight"], out=scale)
    head = replace(head, loss_scale=scale)
    add_gradients(head, operands, attributes, vector, calls)
    head.add_loss(operands["loss"], calls)


@pytest.fixture
def weighted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOSSES, "weighted", Weighted)
    monkeypatch.setitem(registry._COMPOSITIONS, "head_weighted", head_weighted)
    for kernels in ("eager", "triton"):
        formulas, key = workspace._FORMULAS, f"head_weighted/{kernels}"
        monkeypatch.setitem(formulas, key, lambda told: head_loss(told) + float32_bytes(1))


def plan_of(loss: Loss) -> RankSchedule:
    recipe = Recipe(
        loss=loss, kernels=KernelChoice(), update="sgd", beta1=0.0, weight_decay=0.0,
        stochastic_rounding=False,
    )  # fmt: skip
    step = TrainingStep(24, 48, 24, 1, recipe=recipe)
    spec = small("tiny", dtype="float32")
    request = PlanRequest.of(spec, MACHINE, step=step, device_mem=None, host_mem=None)
    return Planner(steady_state).plan(request).only


def changes(schedule: RankSchedule) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of a step of plain SGD, and what it adds to parameters."""
    recipe = Recipe.model_validate(schedule.recipe)
    state = initial_state(small("tiny", dtype="float32"), seed=1, recipe=recipe)
    before = {name: flat.clone() for name, flat in state.items() if name.startswith("param.")}

    def tokens(step: int, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, 256, (2, 24), generator=generator).to(torch.int32)

    loop = Training(tokens, 1.0, seed=3)
    result = execute(schedule, state, loop.host_work(schedule), RunOptions(num_passes=1))
    after = result.state
    assert after is not None
    return loop.losses[0], {
        name: after[name].view(torch.float32) - flat.view(torch.float32)
        for name, flat in before.items()
    }


@pytest.mark.usefixtures("weighted")
def test_a_third_loss_is_planned_and_trained() -> None:
    """Four times the loss has four times the gradients, and SGD's step is a gradient."""
    schedule = plan_of(loss_of("weighted,weight=4"))
    assert schedule.recipe["weighted"] == {"weight": 4.0}
    again = RankSchedule.model_validate_json(schedule.model_dump_json())
    loss, steps = changes(again)
    once, plain = changes(plan_of(CrossEntropy()))
    assert loss == pytest.approx(4 * once, rel=1e-6)
    for name, step in steps.items():
        torch.testing.assert_close(step, 4 * plain[name], rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("weighted")
def test_options_and_refusals_know_a_third_loss() -> None:
    asked = ("--machine", "cpu", "--model", "tiny", "--seq-len", "64", "--tokens-per-step", "64")
    found = call("plan", *asked, "--loss", "weighted,weight=3", "--json")
    assert found.code == 0, found.err
    for text, why in {
        "weighted,scale=1": "weighted has no 'scale'; write it as weighted,weight=1",
        "weighted,weight=0": "weight: Input should be greater than 0",
        "other": "write dpo, weighted, or FILE.py:FUNCTION",
    }.items():
        refused = call("plan", *asked, "--loss", text)
        assert refused.code == 2 and why in " ".join(refused.err.split())


def test_a_document_with_a_loss_that_is_not_here_is_refused() -> None:
    fields = Recipe().model_dump(mode="json")
    assert "dpo" not in fields and "loss" not in fields
    assert Recipe.model_validate(fields | {"dpo": {"beta": 0.2}}).loss.text is not None
    for wrong in ({"weighted": {}}, {"loss": {"weighted": {}}}, {"dpo": {"beta": 0}},
                  {"loss": "dpo"}, {"dpo": {}, "loss": {"dpo": {}}}):  # fmt: skip
        with pytest.raises((ValueError, TwinstreamError)):
            Recipe.model_validate(fields | wrong)

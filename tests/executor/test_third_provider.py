"""A third provider of models is a class, and an entry of three registries: it is planned, kept in
documents, drawn, run and saved with nothing else that knows of it."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import pytest
import torch

from tests.helpers.plans import MACHINE
from tests.helpers.tiny_chains import small
from twinstream.executor.program.options import RunOptions
from twinstream.executor.providers.decoders import Decoders
from twinstream.executor.providers.provider import Weights
from twinstream.executor.providers.registry import PROVIDERS, provider_of
from twinstream.executor.run.execute import execute
from twinstream.executor.run.training import Training
from twinstream.executor.state.training_state import initial_state
from twinstream.models import model as models
from twinstream.models.lowering.decoder import DecoderLowering
from twinstream.models.lowering.lower import LOWERINGS
from twinstream.models.model import KINDS, Model, NotExecutableError, model_of, require_decoder
from twinstream.models.recipe import KernelChoice, Recipe
from twinstream.models.spec import ModelSpec
from twinstream.models.trained import frozen_groups
from twinstream.planner.planner import Planner
from twinstream.planner.request import PlanRequest, TrainingStep
from twinstream.schedule.document import RankSchedule
from twinstream.simulator.replay import steady_state

RECIPE = Recipe(kernels=KernelChoice())


class Halved(ModelSpec):
    """A model of its own documents, that begins at half of what a decoder begins at."""

    kind: Literal["halved"] = "halved"
    MARKS: ClassVar[frozenset[str]] = frozenset({"kind"})
    provider: ClassVar[str] = "halved"
    decoder: ClassVar[None] = None  # type: ignore[assignment]


class Halves(Decoders):
    def fresh(self, model: Halved, seed: int) -> Weights:
        for group, flat in super().fresh(model, seed):
            yield group, flat.view(torch.float32).div(2).view(torch.uint8)


@pytest.fixture
def halved(monkeypatch: pytest.MonkeyPatch) -> Halved:
    monkeypatch.setattr(models, "KINDS", (Halved, *KINDS))
    monkeypatch.setitem(LOWERINGS, "halved", DecoderLowering)  # type: ignore[arg-type]
    monkeypatch.setitem(PROVIDERS, "halved", Halves)
    return Halved.model_validate(dict(small("tiny", dtype="float32")))


def plan_of(spec: Model) -> RankSchedule:
    step = TrainingStep(24, 48, 24, 1, recipe=RECIPE)
    request = PlanRequest.of(spec, MACHINE, step=step, device_mem=None, host_mem=None)
    return Planner(steady_state).plan(request).only


def losses(schedule: RankSchedule, state: Mapping[str, torch.Tensor]) -> list[float]:
    def tokens(step: int, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, 256, (2, 24), generator=generator).to(torch.int32)

    loop = Training(tokens, 1e-2, seed=3)
    execute(schedule, state, loop.host_work(schedule), RunOptions(num_passes=2))
    return loop.losses


def test_a_third_provider_is_planned_and_run(halved: Halved) -> None:
    spec: Any = small("tiny", dtype="float32")
    schedule = RankSchedule.model_validate_json(plan_of(halved).model_dump_json())
    assert type(model_of(schedule.model)) is Halved
    state, plain = (initial_state(one, 1, RECIPE) for one in (halved, spec))
    for name, flat in plain.items():
        half = flat.view(torch.float32) / (2 if name.startswith("param.") else 1)
        assert torch.equal(state[name].view(torch.float32), half)
    assert losses(schedule, state) == losses(plan_of(spec), state)
    assert type(provider_of(halved)) is Halves and type(provider_of(spec)) is Decoders


def test_what_only_decoders_have_is_refused_of_a_third_provider(halved: Halved) -> None:
    """Its weights are named as they lie: it says no names that files have."""
    assert frozen_groups(halved, ["attention_norm", "q*", "o_*", "ffn*", "gate*", "down*"]) == (
        *map(str, range(halved.num_layers)),
    )
    with pytest.raises(NotExecutableError):
        require_decoder(halved)

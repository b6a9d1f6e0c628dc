"""Plans of steps and of chains, through the planner's front door."""

from collections.abc import Sequence
from dataclasses import replace

from twinstream.hardware_profiles.schema import Machine
from twinstream.models.recipe import KernelChoice, Recipe
from twinstream.models.spec import ModelSpec
from twinstream.planner.choices import OPEN, Choices
from twinstream.planner.evaluator import Evaluator
from twinstream.planner.limits import LIMITS, SearchLimits
from twinstream.planner.planner import Planner
from twinstream.planner.policies import plan_by_rule
from twinstream.planner.proof import proven, step_bound
from twinstream.planner.request import PlanRequest, TrainingStep
from twinstream.planner.reuse import Reuse
from twinstream.planner.search.cuts import Cuts
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps, RankSchedule, Schedule
from twinstream.simulator.replay import steady_state


def request_of(
    spec: ModelSpec,
    step: TrainingStep,
    machine: Machine,
    caps: Caps,
    policy: str = "optimal",
    choices: Choices = OPEN,
) -> PlanRequest:
    """A request; kernels that are open are those that `lower` takes, on every machine."""
    if step.recipe.kernels is None:
        recipe = step.recipe.model_copy(update={"kernels": KernelChoice()})
        step = replace(step, recipe=recipe)
    return PlanRequest(spec, step, machine, caps, policy, choices)


def plan_step(  # noqa: PLR0913
    spec: ModelSpec,
    step: TrainingStep,
    machine: Machine,
    caps: Caps,
    policy: str = "optimal",
    choices: Choices = OPEN,
    known: Sequence[RankSchedule] = (),
    evaluator: Evaluator = steady_state,
    limits: SearchLimits = LIMITS,
) -> RankSchedule:
    """A plan by a planner of its own."""
    request = request_of(spec, step, machine, caps, policy, choices)
    known_plans = [Schedule.of_rank(one) for one in known]
    return Planner(evaluator, limits).plan(request, known_plans).only


def plan_chain(
    chain: Chain, machine: Machine, caps: Caps, policy: str, limits: SearchLimits = LIMITS
) -> RankSchedule:
    """A plan of a chain, proven and with its bound; `optimal` plans a step that is cut so."""
    if policy == "optimal":
        spec = ModelSpec.model_validate(chain.model.spec)
        return plan_step(spec, step_of(chain), machine, caps, limits=limits)
    schedule = plan_by_rule(chain, machine, caps, policy)
    return proven(schedule, chain, step_bound(chain, machine, caps))


def step_of(chain: Chain) -> TrainingStep:
    """The step of which the chain is the only cut."""
    cut = chain.workload
    return TrainingStep(
        seq_len=cut.seq_len,
        tokens_per_step=cut.tokens_per_step,
        chunk_tokens=cut.chunk_tokens,
        chunks_per_round=cut.chunks_per_round,
        recipe=Recipe.model_validate(chain.recipe),
        packing=cut.packing,
    )


def cuts_of(
    spec: ModelSpec,
    step: TrainingStep,
    machine: Machine,
    caps: Caps,
    choices: Choices = OPEN,
    limits: SearchLimits = LIMITS,
) -> Cuts:
    """The ways to cut a step."""
    return Cuts(request_of(spec, step, machine, caps, "optimal", choices), Reuse(), limits)

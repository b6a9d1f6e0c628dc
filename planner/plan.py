"""Plan by policy name; every plan is verified before it is returned."""

from collections.abc import Callable, Mapping

from twinstream.hardware_profiles.schema import Machine
from twinstream.models.recipe import OptimizerPlace, Recipe
from twinstream.planner.bound.host_bound import raised_by_host
from twinstream.planner.bound.lower_bound import LowerBound, lower_bound
from twinstream.planner.judge import Judge
from twinstream.planner.lifetimes.host_tasks import host_tasks, without_host_tasks
from twinstream.planner.lifetimes.rounds import PROGRAM_ROUNDS, with_rounds
from twinstream.planner.rules.full_recompute import plan_full_recompute
from twinstream.planner.rules.layer_offload import plan_layer_offload
from twinstream.planner.rules.optimizer_offload import plan_optimizer_offload
from twinstream.planner.rules.resident import plan_resident
from twinstream.planner.rules.streaming import plan_streaming
from twinstream.planner.search.optimal import plan_optimal
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps, Schedule, StepBound
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.proof.conforms import require_conforming
from twinstream.schedule.proof.verify import require_safe

Policy = Callable[[Chain, Machine, Caps, Judge | None], Schedule]


class UnknownPolicyError(TwinstreamError):
    """No policy of that name."""


class WrongChainError(TwinstreamError):
    """The chain's optimizer runs elsewhere than the policy has it."""


def policies() -> Mapping[str, Policy]:
    """The policies by name; the last three model what others do, for comparison."""
    return {
        "optimal": plan_optimal,
        "streaming": plan_streaming,
        "resident": plan_resident,
        "full_recompute": plan_full_recompute,
        "optimizer_offload": plan_optimizer_offload,
        "layer_offload": plan_layer_offload,
    }


def optimizer_place(policy: str) -> OptimizerPlace:
    """Where and when the chains of a policy update the parameters: `Recipe.optimizer`."""
    places: Mapping[str, OptimizerPlace] = {
        "optimizer_offload": "host",
        "layer_offload": "host_after_backward",
    }
    return places.get(policy, "device")


def recipe_of(policy: str, recipe: Recipe) -> Recipe:
    """The recipe with its optimizer where the policy has it.

    Policies with the optimizer on the device take either order of its tasks, as the recipe says.
    """
    if recipe.optimizer in _places(policy):
        return recipe
    return recipe.model_copy(update={"optimizer": optimizer_place(policy)})


def _places(policy: str) -> tuple[OptimizerPlace, ...]:
    place = optimizer_place(policy)
    return (place, "device_after_backward") if place == "device" else (place,)


def plan_chain(
    chain: Chain, machine: Machine, caps: Caps, policy: str, judge: Judge | None = None
) -> Schedule:
    """A verified, conforming schedule of the chain within the caps, with the chain's lower bound.

    Args:
        chain: the training step.
        machine: what it is planned for.
        caps: of both memories.
        policy: by name.
        judge: a simulator of that machine; `optimal` asks it.

    Raises:
        UnknownPolicyError: the message lists the policies there are.
        WrongChainError: the chain's recipe has another `optimizer` than the policy.
        InfeasiblePlan: the caps are too small for the policy; it says what would do.
    """
    known = policies()
    if policy not in known:
        raise UnknownPolicyError(f"unknown policy '{policy}'; known: {', '.join(known)}")
    _require_chain_of(policy, chain)
    schedule = known[policy](chain, machine, caps, judge)
    return finished(schedule, chain, step_bound(chain, machine, caps))


def finished(schedule: Schedule, chain: Chain, bound: StepBound | None) -> Schedule:
    """The schedule with its bound, proven safe and conforming."""
    require_safe(schedule)
    require_conforming(schedule, chain)
    return schedule.model_copy(update={"bound": bound})


def step_bound(chain: Chain, machine: Machine, caps: Caps) -> StepBound | None:
    """The lower bound in the form that schedules carry; None when nothing fits the caps.

    Of a chain with tasks on the host it is that of `raised_by_host`.
    """
    few = with_rounds(chain, PROGRAM_ROUNDS)
    with_host = bool(host_tasks(chain))
    if with_host:
        few = without_host_tasks(few)
    found = lower_bound(few, machine, caps, num_rounds=len(chain.round_starts))
    if found is None:
        return None
    bound = as_step_bound(found)
    return raised_by_host(bound, chain, machine) if with_host else bound


def as_step_bound(found: LowerBound, family_step_s: float | None = None) -> StepBound:
    """A lower bound as schedules carry it; with the least one of a family of chains."""
    return StepBound(
        step_s=found.step_s,
        device_s_per_gib=found.device_s_per_gib,
        host_s_per_gib=found.host_s_per_gib,
        link_s_per_gb_per_s=found.link_s_per_gb_per_s,
        limits=found.limits,
        family_step_s=family_step_s,
    )


def _require_chain_of(policy: str, chain: Chain) -> None:
    place, wanted = chain.recipe.get("optimizer", "device"), optimizer_place(policy)
    if place not in _places(policy):
        raise WrongChainError(
            f"policy '{policy}' plans chains with the optimizer on '{wanted}', this one has it on "
            f"'{place}': lower it with Recipe(optimizer=\"{wanted}\")"
        )

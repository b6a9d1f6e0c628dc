"""Policies by name: those of `rules`, and those that other packages register.

A package registers a policy by an entry point of the group `twinstream.policies` in its
pyproject.toml, whose object is a `Policy`:

    [project.entry-points."twinstream.policies"]
    greedy = "my_package.greedy:POLICY"

Without packaging, `FILE.py:POLICY` is one, too. `twinstream.toolkit` has what a rule is made of.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points

from twinstream.hardware_profiles.schema import Machine
from twinstream.models.lowering.lower import lower
from twinstream.models.recipe import OptimizerPlace
from twinstream.planner.infeasible import InfeasiblePlan, least_short
from twinstream.planner.lifetimes.rounds import PROGRAM_ROUNDS
from twinstream.planner.request import DEFAULT_POLICY, PlanRequest
from twinstream.planner.rules.full_recompute import plan_full_recompute
from twinstream.planner.rules.layer_offload import plan_layer_offload
from twinstream.planner.rules.optimizer_offload import plan_optimizer_offload
from twinstream.planner.rules.resident import plan_resident
from twinstream.planner.rules.streaming import plan_streaming
from twinstream.planner.search.chunking import chunkings, with_few_blocks
from twinstream.schedule.chain import Chain
from twinstream.schedule.document import Caps, RankSchedule
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.python_file import object_of_file, split_name

GROUP = "twinstream.policies"
ON_DEVICE: tuple[OptimizerPlace, ...] = (
    "device",
    "device_after_backward",
    "device_before_next_use",
)
_MOST_BLOCKS = 10_000  # planned by rules: half a minute

ChainRule = Callable[[Chain, Machine, Caps], RankSchedule]


class UnknownPolicyError(TwinstreamError):
    """There is no policy of that name."""


class WrongChainError(TwinstreamError):
    """The chain's optimizer runs elsewhere than the policy needs it."""


@dataclass(frozen=True)
class Policy:
    """A named way to plan a training step: a function from a request to a schedule and its chain.

    Args:
        name: by which it is asked for.
        plan: from a request to a schedule and the chain that it computes; it raises
            `InfeasiblePlan` where the caps are too small. What comes back is proven by the planner.
        optimizer: where its chains may update the parameters; the first is taken where the request
            has another place.
        own_step: whether it replaces the recipe, and decides tokens per step where they are open.
    """

    name: str
    plan: Callable[[PlanRequest], tuple[RankSchedule, Chain]]
    optimizer: tuple[OptimizerPlace, ...] = ON_DEVICE
    own_step: bool = False

    @staticmethod
    def by_chain(
        name: str, rule: ChainRule, optimizer: tuple[OptimizerPlace, ...] = ON_DEVICE
    ) -> "Policy":
        """Make a policy of a function that plans any chain, on the preferred cut that fits."""
        return Policy(name, partial(_first_that_fits, rule), optimizer)


_RULES: Mapping[str, tuple[ChainRule, tuple[OptimizerPlace, ...]]] = {
    "streaming": (plan_streaming, ON_DEVICE),
    "resident": (plan_resident, ON_DEVICE),
    "full_recompute": (plan_full_recompute, ON_DEVICE),
    "optimizer_offload": (plan_optimizer_offload, ("host",)),
    "layer_offload": (plan_layer_offload, ("host_after_backward",)),
}


def policies() -> Mapping[str, Policy]:
    """Return all policies but `optimal`: the project's own, then those of other packages.

    The last three of our own model what others do, for comparison.
    """
    found = {name: Policy.by_chain(name, rule, places) for name, (rule, places) in _RULES.items()}
    for entry in entry_points(group=GROUP):
        policy = entry.load()
        if not isinstance(policy, Policy):
            raise TwinstreamError(
                f"the entry point '{entry.name}' of {GROUP} is a {type(policy).__name__}, "
                "not a twinstream.Policy"
            )
        found.setdefault(policy.name, policy)
    return found


def policy_names() -> tuple[str, ...]:
    return (DEFAULT_POLICY, *policies())


def compared_names() -> tuple[str, ...]:
    """Return the policies that plan the same step: `optimal` and the project's own rules."""
    return (DEFAULT_POLICY, *_RULES)


def optimizer_place(policy: str) -> OptimizerPlace:
    """Return where and when the chains of a policy update parameters: `Recipe.optimizer`."""
    return optimizer_places(policy)[0]


def optimizer_places(policy: str) -> tuple[OptimizerPlace, ...]:
    """
    Raises:
        UnknownPolicyError: the message lists the policies there are.
    """
    if policy == DEFAULT_POLICY:
        return ON_DEVICE
    return policy_named(policy).optimizer


def policy_named(name: str) -> Policy:
    """A policy by its name, or `FILE.py:NAME` of a person's own file.

    Raises:
        UnknownPolicyError: the message lists the policies there are.
        TwinstreamError: the file cannot be run, or has no such policy.
    """
    first, several, _ = name.partition(",")
    if several and first in ("all", *policy_names()):
        raise UnknownPolicyError(
            f"'{name:.80}' are several policies, and a plan is by one: a sweep with axes.policy "
            "compares them (twinstream sweep FILE.toml)"
        )
    if (own := split_name(name)) is not None:
        policy = object_of_file(*own)
        if not isinstance(policy, Policy):
            raise TwinstreamError(
                f"'{own[1]}' of {own[0]} is a {type(policy).__name__}, not a Policy: make it with "
                "twinstream.toolkit.Policy.by_chain(NAME, FUNCTION)"
            )
        return policy
    known = policies()
    if name not in known:
        raise UnknownPolicyError(
            f"unknown policy '{name}'; known: {', '.join(policy_names())}, or FILE.py:NAME of your "
            "own; `twinstream sweep` compares several"
        )
    return known[name]


def plan_by_rule(chain: Chain, machine: Machine, caps: Caps, policy: str) -> RankSchedule:
    """Return the schedule of one of our own rules for a given chain; it is not proven yet.

    Raises:
        UnknownPolicyError: no rule of ours has that name.
        WrongChainError: the chain's recipe has another `optimizer` than the policy.
        InfeasiblePlan: the caps are too small for the policy; it says what would do.
    """
    if policy not in _RULES:
        raise UnknownPolicyError(f"unknown policy '{policy}'; known: {', '.join(_RULES)}")
    rule, places = _RULES[policy]
    if (place := chain.recipe.get("optimizer", "device")) not in places:
        raise WrongChainError(
            f"policy '{policy}' plans chains with the optimizer on '{places[0]}', this one has it "
            f"on '{place}': lower it with Recipe(optimizer=\"{places[0]}\")"
        )
    return rule(chain, machine, caps)


def _first_that_fits(rule: ChainRule, request: PlanRequest) -> tuple[RankSchedule, Chain]:
    failed: list[InfeasiblePlan] = []
    workloads = chunkings(request.spec, request.step)
    for workload in with_few_blocks(request.spec, workloads, PROGRAM_ROUNDS, _MOST_BLOCKS):
        chain = lower(request.spec, workload, request.recipe)
        try:
            return rule(chain, request.machine, request.caps), chain
        except InfeasiblePlan as error:
            failed.append(error)
    raise least_short(failed)

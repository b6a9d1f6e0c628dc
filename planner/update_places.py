"""Which groups of parameters the host CPU updates: few candidates, by the program of the bound."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from twinstream.models.providers.trained import trained_groups
from twinstream.models.recipes.recipe import Recipe
from twinstream.planner.choices import ChoiceError, UpdatePlaces
from twinstream.planner.lifetimes.host_tasks import host_tasks
from twinstream.planner.request import PlanRequest
from twinstream.planner.search.cuts import Cuts
from twinstream.schedule.chain import Chain

_SHARES = (0.5, 0.75, 1.0, 1.25)  # of the share that the program has on the host


def placed_updates(
    request: PlanRequest, groups: Sequence[str] = (), where: UpdatePlaces = "recipe"
) -> PlanRequest:
    """Return the request with the updates of these groups on the host, and of others on the
    device."""
    if set(groups) == set(trained_groups(request.spec, request.recipe)):
        return placed_as(request, Recipe(optimizer="host"), where)
    return placed_as(request, Recipe(host_groups=tuple(groups)), where)


def placed_as(request: PlanRequest, other: Recipe, where: UpdatePlaces = "recipe") -> PlanRequest:
    """Return the request with updates where another recipe has them."""
    choices = replace(request.choices, optimizer=where)
    places = {"optimizer": other.optimizer, "host_groups": other.host_groups}
    recipe = request.recipe.model_copy(update=places)
    return replace(request, choices=choices, step=replace(request.step, recipe=recipe))


def why_not_on_host(request: PlanRequest) -> str | None:
    """Why no update of a request can be the host's; None where they can."""
    recipe, choices = request.recipe, request.choices
    if recipe.clips:
        return (
            "gradients are clipped, by a norm that the device makes of all: train without "
            "(--max-grad-norm 0), or leave it out"
        )
    if not recipe.places_among(("host",)):
        return "Muon's matrix products are the device's"
    if recipe.optimizer not in ("device", "host"):
        return f"the recipe has the optimizer '{recipe.optimizer}'"
    if request.machine.pool_bytes is not None:
        return f"{request.machine.name} has one memory"
    if choices.keeps_state:
        return "a --home is the device, and what the host updates is at home there"
    if request.caps.disk_bytes is not None:
        return "with a disk they are the device's yet: leave out one of both"
    return None


def require_on_host(request: PlanRequest) -> None:
    """
    Raises:
        ChoiceError: no update of the request can be the host's.
    """
    if (why := why_not_on_host(request)) is not None:
        asked = request.choices.optimizer
        flag = f"--optimizer {'host' if asked == 'recipe' else asked}"
        raise ChoiceError(f"updates on the host ({flag}): {why}")


def groups_on_host(recipe: Recipe, groups: Sequence[str]) -> int:
    """Count those of some groups that the host updates."""
    return sum(recipe.updates_on_host(group) for group in groups)


def likely_splits(request: PlanRequest, opened: Cuts) -> list[tuple[str, ...]]:
    """Return groups to update on the host, the least bound first; none where no split is better.

    The program in which each update is the device's or the host's in any fraction says how much of
    all the host should have. It gets what backward is through with first, since the next step waits
    for what is updated last. Near that share are the candidates.

    Args:
        request: with all updates on the device.
        opened: the cuts of the step, with the places of updates open.
    """
    if not opened.usual:
        return []
    best = opened.usual[0]
    everywhere = placed_updates(request, trained_groups(request.spec, request.recipe))
    chain = opened.reuse.view(request.spec, best.workload, everywhere.recipe, 1).chain
    named = {f"param.{group}": group for group in trained_groups(request.spec, request.recipe)}
    sizes = _sizes_in_order(chain, named, best.bound.on_host)
    total, wanted = sum(size for size, _ in sizes.values()), sum(part for _, part in sizes.values())
    splits: dict[tuple[str, ...], float] = {}
    for share in _SHARES:
        taken, split = 0.0, list[str]()
        for group, (size, _) in sizes.items():
            if taken + size / 2 > share * wanted:
                break
            taken += size
            split.append(group)
        if 0.0 < taken < total:
            placed = placed_updates(request, split)
            bound = Cuts(placed, opened.reuse, opened.limits).raised_bound(best.workload)
            if bound is not None:
                splits[placed.recipe.host_groups] = bound.step_s
    return sorted(splits, key=splits.__getitem__)


def _sizes_in_order(
    chain: Chain, named: Mapping[str, str], on_host: Mapping[str, float]
) -> dict[str, tuple[float, float]]:
    """By group, as they are updated: bytes of its parameters, and those of them on the host."""
    sizes = {tensor.tensor_id: tensor.size_bytes for tensor in chain.tensors}
    roots = {tensor.tensor_id: tensor.parent or tensor.tensor_id for tensor in chain.tensors}
    roles = {tensor.tensor_id: tensor.role for tensor in chain.tensors}
    found: dict[str, tuple[float, float]] = {}
    for task in host_tasks(chain):
        for operand in task.operands:
            if operand.mode == "update" and roles[operand.tensor] == "parameter":
                group = named[roots[operand.tensor]]
                size, part = found.get(group, (0.0, 0.0))
                mine = float(sizes[operand.tensor])
                share = on_host.get(task.task_id, 0.0)
                found[group] = size + mine, part + mine * share
    return found

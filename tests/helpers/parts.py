"""Optimizer tasks cut into other parts than usual."""

from itertools import pairwise

import pytest

from twinstream.executor.state import training_state
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.lowering import declarations, optimizer_tasks
from twinstream.models.lowering.declarations import OptimizerPart
from twinstream.models.recipes.recipe import Recipe

PART_UNIT = 256  # elements: a block of 8-bit codes


def cut_into_thirds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every group, from now on."""
    whole = declarations.optimizer_parts

    def thirds(
        spec: ModelSpec, group: str, recipe: Recipe | None = None
    ) -> tuple[OptimizerPart, ...]:
        total = sum(part.num_elements for part in whole(spec, group, recipe))
        bounds = [total * i // 3 // PART_UNIT * PART_UNIT for i in range(3)] + [total]
        return tuple(
            OptimizerPart(f"{group}.part{i}", low, high - low)
            for i, (low, high) in enumerate(pairwise(bounds))
        )

    for module in (declarations, optimizer_tasks, training_state):
        monkeypatch.setattr(module, "optimizer_parts", thirds)

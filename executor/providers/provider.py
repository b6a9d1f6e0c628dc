"""All that the executor asks of a provider of models."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from twinstream.executor.kernels.operand import Kernel
from twinstream.executor.kernels.registry import registered_kernel
from twinstream.executor.program.module_programs import ModulePrograms
from twinstream.executor.weights.carried_tensors.carried import CarriedTensors
from twinstream.executor.weights.disk_reader import FileExtent
from twinstream.models.recipes.lora import Lora
from twinstream.models.recipes.recipe import Recipe

Weights = Iterable[tuple[str, torch.Tensor]]
"""Name and flat parameters of group after group, 1-D uint8 on the host."""
Extents = tuple[FileExtent, ...]
Tell = Callable[[str], None]


class Outline(Protocol):
    """All of a folder of weights but their values, known before a run begins."""

    @property
    def carried(self) -> CarriedTensors | None:
        """Tensors that are written as they were; None where adapters alone are written."""

    def write(self, folder: Path, read_group: Callable[[str], torch.Tensor]) -> None:
        """Write the folder, asking for the flat parameters of one group after the other."""


class Provider(ABC):
    """What a class of models has beside its description: kernels, weights, folders.

    The models given are those whose `provider` is the key in `registry.PROVIDERS`. Files that are
    missing, broken or another model's raise WeightsError.
    """

    def kernel(self, model: Any, key: str, programs: ModulePrograms) -> Kernel:
        """Return the kernel of a call."""
        return registered_kernel(key)

    def has_own_loss(self, model: Any) -> bool:
        """Return whether a person's own function is the loss of each row."""
        return False

    @abstractmethod
    def require_savable(self, model: Any) -> None:
        """Refuse a model that could be drawn, and not be saved."""

    @abstractmethod
    def fresh(self, model: Any, seed: int) -> Weights:
        """Draw each group's flat parameters in turn."""

    @abstractmethod
    def check(self, folder: Path, model: Any, *, has_weights: bool) -> None:
        """Check the headers of a folder's weights, without which a folder may be."""

    def in_place(self, folder: Path, model: Any, recipe: Recipe, group: str) -> Extents | None:
        """Return where a folder's files have a group as the recipe keeps it, byte for byte; None
        where they have it otherwise."""
        return None

    @abstractmethod
    def parameters(
        self, folder: Path, model: Any, recipe: Recipe, run: Path | None, tell: Tell,
        left_out: Collection[str] = (),
    ) -> Weights:  # fmt: skip
        """Read the groups of a folder, as the recipe keeps them.

        Args:
            left_out: groups that are not asked for.
            run: a folder beside which blocks in few bits are kept, once they are made.
            tell: takes a line on those that are made anew.
        """

    @abstractmethod
    def with_adapters(self, folder: Path, model: Any, base: Weights) -> Weights:
        """Read a PEFT folder's adapters behind the groups of their base."""

    def lora_in(self, folder: Path, model: Any) -> Lora | None:
        """Return the recipe's adapters that a PEFT folder has; None where the model has its own."""
        return None

    def buffers(self, folder: Path, model: Any) -> Mapping[str, torch.Tensor]:
        """Read what a folder has beside parameters, and no step changes."""
        return {}

    @abstractmethod
    def outline(self, model: Any, like: Path | None, recipe: Recipe, base: str | None) -> Outline:
        """Return the outline of a run's checkpoints.

        Args:
            like: the folder whose config, tokenizer and division into files are taken over.
            base: what the folder of adapters says of its base.

        Raises:
            HfConfigError: there is no `like`, and no family of transformers is like this model.
        """

"""What the parts of traced modules run by: made once in a run, without torch until then."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from twinstream.models.providers.traced import TracedModel

if TYPE_CHECKING:
    import torch

    from twinstream.executor.kernels.operand import Kernel
    from twinstream.executor.modules.module_program import ModuleProgram


@dataclass
class ModulePrograms:
    """The programs of a run's modules, each made once; none when it goes to another process.

    Attributes:
        buffers: values of the modules' buffers, where they are not those that the class gives them.
    """

    buffers: Mapping[str, "torch.Tensor"] = field(default_factory=dict)
    _made: dict[tuple[str, str], "ModuleProgram"] = field(default_factory=dict)

    def of(self, model: TracedModel, device: "torch.device") -> "ModuleProgram":
        """The program of a model on a device; its own loss is tried as where it was traced."""
        from twinstream.executor.modules.blocks import OWN_LOSS
        from twinstream.executor.modules.module_program import ModuleProgram
        from twinstream.executor.modules.rows_and_values import check_own_loss

        key = model.ref().content_hash, str(device)
        if key not in self._made:
            program = ModuleProgram(model, device, self.buffers)
            if (loss := getattr(program.module, OWN_LOSS, None)) is not None:
                check_own_loss(loss, model.vocab_size)
            self._made[key] = program
        return self._made[key]

    def kernel(self, model: TracedModel, key: str) -> "Kernel":
        """The kernel that a call of a traced model's schedule names.

        Raises:
            TwinstreamError: there is none of that name.
        """
        from twinstream.executor.modules.module_kernels import module_kernel

        return module_kernel(key, lambda device: self.of(model, device))

    def __getstate__(self) -> dict[str, object]:
        return {"buffers": self.buffers, "_made": {}}

"""LoRA in a block: y = x W^T + low B^T with low = scale x A^T, and its gradients, by hand.

The adapters' share of an output is written first, and the base's product added to it: it is
rounded by itself, and the sum once. The same goes for the gradient of an input. `low` is saved
from forward to backward. Legend: T tokens, R columns of low at a site (rank x targets), I width
of the input, O of an output.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from twinstream.executor.kernels.block.block_call import BlockCall
from twinstream.executor.kernels.calls import Calls
from twinstream.executor.kernels.operand import Operands
from twinstream.executor.kernels.vector.gradients import (
    add_matmul,
    gradient_views,
    weight_views,
)
from twinstream.executor.kernels.workspace import Workspace
from twinstream.models.kernel_costs.attributes import Attributes
from twinstream.models.layout import FlatLayout
from twinstream.models.recipes.adapter_layout import (
    AdapterSite,
    adapter_layout,
    adapter_sites,
    expert_sites,
)
from twinstream.models.recipes.lora import Lora
from twinstream.schedule.ops import Mode


@dataclass(frozen=True)
class Adapters:
    """The adapters of a block, and where their calls go; one without LoRA has no sites.

    Those of routed experts, at `expert_sites`, are used by those who multiply with the experts.
    With `is_again`, of a part of a block, `low` is a temporary, which each kernel makes anew.
    """

    calls: Calls
    sites: Mapping[str, AdapterSite]
    scale: float
    weights: Mapping[str, torch.Tensor]
    low: Mapping[str, torch.Tensor]  # by site, [T, R]
    rank: int = 0
    expert_sites: tuple[str, ...] = ()
    is_again: bool = False

    @classmethod
    def of(
        cls, operands: Operands, call: BlockCall, calls: Calls, workspace: Workspace
    ) -> "Adapters":
        lora = call.lora
        if lora is None:
            return cls(calls, {}, 0.0, {}, {})
        sites = {site.name: site for site in adapter_sites(call.spec, lora)}
        weights: dict[str, torch.Tensor] = {}
        for name, layout in _layouts(call, lora, "adapters").items():
            weights |= weight_views(operands[name], layout, call.dtype)
        low, before_bytes = {}, 0
        for name, site in sites.items():
            shape = (call.num_tokens, site.low_width)
            if call.in_parts:
                low[name] = workspace.take(shape, call.dtype)
                continue
            low[name] = operands["low"].view(call.dtype, shape, before_bytes)
            before_bytes += low[name].numel() * call.dtype.itemsize
        has_experts = call.ep == 1  # or those who have them use their adapters, too
        of_experts = tuple(site.name for site in expert_sites(call.spec, lora) if has_experts)
        return cls(calls, sites, lora.scale, weights, low, lora.rank, of_experts, call.in_parts)

    def write_low_again(self, site: str, x_TI: torch.Tensor) -> None:
        """Where forward has not left it."""
        if self.is_again:
            self.write_low(site, x_TI)

    def write_low(self, site: str, x_TI: torch.Tensor) -> None:
        """Forward only; a recompute finds it there."""
        if site in self.sites:
            self._write_scaled(x_TI, self.weights[f"{site}_a"].t(), self.low[site])

    def write_shares(
        self, site: str, outputs: Sequence[tuple[str, torch.Tensor]],
        bias: torch.Tensor | None = None,
    ) -> bool:  # fmt: skip
        """Start outputs, by projection, with the adapters' share; whether there are any.

        The share of one that is no target is its bias or zero. The columns of `bias` are those of
        all outputs together.
        """
        if site not in self.sites:
            return False
        start = 0
        for name, out_TO in outputs:
            end = start + out_TO.shape[1]
            self._write_share(site, name, out_TO, None if bias is None else bias[start:end])
            start = end
        return True

    def add_share(self, site: str, name: str, base_TO: torch.Tensor, out_TO: torch.Tensor) -> None:
        """out = base + the adapters' share."""
        b_RO = self.weights[f"{name}_b"].t()
        self.calls.add(torch.addmm, base_TO, self.low_of(site, name), b_RO, out=out_TO)

    def write_low_gradient(
        self, site: str, d_outputs: Mapping[str, torch.Tensor], workspace: Workspace
    ) -> torch.Tensor | None:
        """The gradient of x A^T, [T, R], from those of a site's outputs; in the workspace."""
        if site not in self.sites:
            return None
        low = self.low[site]
        d_low_TR = workspace.take((low.shape[0], low.shape[1]), low.dtype)
        for name in self.sites[site].adapted:
            columns = d_low_TR[:, self._columns(site, name)]
            self._write_scaled(d_outputs[name], self.weights[f"{name}_b"], columns)
        return d_low_TR

    def input_gradient(
        self, site: str, d_low_TR: torch.Tensor | None, d_out_TO: torch.Tensor,
        weight_OI: torch.Tensor, out_TI: torch.Tensor,
    ) -> None:  # fmt: skip
        """out = d_low A + d_out W."""
        if d_low_TR is None:
            self.calls.add(torch.mm, d_out_TO, weight_OI, out=out_TI)
            return
        self.calls.add(torch.mm, d_low_TR, self.weights[f"{site}_a"], out=out_TI)
        self.calls.add(torch.addmm, out_TI, d_out_TO, weight_OI, out=out_TI)

    def _write_share(
        self, site: str, name: str, out_TO: torch.Tensor, bias_O: torch.Tensor | None
    ) -> None:
        if name in self.sites[site].adapted:
            low, b_RO = self.low_of(site, name), self.weights[f"{name}_b"].t()
            if bias_O is None:
                self.calls.add(torch.mm, low, b_RO, out=out_TO)
            else:
                self.calls.add(torch.addmm, bias_O, low, b_RO, out=out_TO)
        elif bias_O is None:
            self.calls.add(out_TO.zero_)
        else:
            self.calls.add(out_TO.copy_, bias_O)

    def _write_scaled(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        """out = scale a b, scaled before it is rounded; what was there does not matter."""
        self.calls.add(torch.addmm, out, a, b, beta=0, alpha=self.scale, out=out)

    def low_of(self, site: str, name: str) -> torch.Tensor:
        """The columns of a target, [T, rank]."""
        return self.low[site][:, self._columns(site, name)]

    def _columns(self, site: str, name: str) -> slice:
        names: list[str] = list(self.sites[site].adapted)
        number, rank = names.index(name), self.sites[site].rank
        return slice(number * rank, (number + 1) * rank)


@dataclass(frozen=True)
class AdapterGradients:
    """Where the gradients of a block's adapters go."""

    adapters: Adapters
    by_name: Mapping[str, torch.Tensor]
    mode: Mode

    @classmethod
    def of(
        cls, adapters: Adapters, operands: Operands, call: BlockCall, attributes: Attributes
    ) -> "AdapterGradients":
        if call.lora is None:
            return cls(adapters, {}, "update")
        by_name: dict[str, torch.Tensor] = {}
        told = _layouts(call, call.lora, "adapter_gradients")
        for name, layout in told.items():
            by_name |= gradient_views(operands[name], layout, attributes, adapters.calls)
        return cls(adapters, by_name, operands["adapter_gradients"].mode if told else "update")

    def begin(self, sites: frozenset[str]) -> None:
        """Zero what another kernel of the part adds to: matrices of sites that are not these."""
        if self.mode != "write":
            return
        own = {f"{site}_{matrix}" for site in sites for matrix in "ab"}
        own |= {f"{t}_b" for site in sites & self.adapters.sites.keys()
                for t in self.adapters.sites[site].adapted}  # fmt: skip
        for name in sorted(self.by_name.keys() - own):
            self.adapters.calls.add(self.by_name[name].zero_)

    def add(
        self, site: str, d_outputs: Mapping[str, torch.Tensor], x_TI: torch.Tensor,
        d_low_TR: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Add d_low^T x to A's gradient and d_out^T low to that of every B of a site."""
        if d_low_TR is None:
            return
        calls = self.adapters.calls
        calls.add(add_matmul, self.by_name[f"{site}_a"], d_low_TR.t(), x_TI, self.mode)
        for name in self.adapters.sites[site].adapted:
            d_out_OT, low = d_outputs[name].t(), self.adapters.low_of(site, name)
            calls.add(add_matmul, self.by_name[f"{name}_b"], d_out_OT, low, self.mode)


def _layouts(call: BlockCall, lora: Lora, operand: str) -> dict[str, FlatLayout]:
    """How the matrices of a block, or of a part and of all parts, lie, by operand."""
    spec = call.spec
    if not call.in_parts:
        layout = adapter_layout(spec, lora, None if call.ep == 1 else "dense")
        return {operand: layout} if layout.tensors else {}
    shared = adapter_layout(spec, lora, "shared")
    return {operand: adapter_layout(spec, lora, "own"), f"shared_{operand}": shared}

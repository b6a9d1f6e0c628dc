"""Experts that ranks share: what goes to them, and what they make of rows of all ranks.

Each rank has some of a layer's experts. It gets the rows that go to them, rank after rank and of
each rank expert by expert, and multiplies the rows of one rank at a time: in products of the shapes
that this rank would have with all experts, so that bits are the same. How many rows there are the
host reads from `counts`. Legend: S rows of a chunk, R rows that came, N ranks, E experts of all, D
d_model, F width of an expert.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from twinstream.executor.kernels.base_codes import levels
from twinstream.executor.kernels.block.block_operands import BlockOperands
from twinstream.executor.kernels.block.experts_forward import RoutedRows, write_rows
from twinstream.executor.kernels.calls import Calls
from twinstream.executor.kernels.experts.permutation import gather_rows, write_row_weights
from twinstream.executor.kernels.operand import DTYPES, KernelOperand, Operands
from twinstream.executor.kernels.vector.gradients import gradient_views, weight_views
from twinstream.executor.kernels.vector.vector_ops import VectorOps
from twinstream.executor.kernels.workspace import Workspace
from twinstream.models.kernel_costs.attributes import (
    Attributes,
    base_format,
    experts_of,
    ranks_of_experts,
    typed_attribute,
)
from twinstream.models.layout import FlatLayout, experts_shapes, packed_layout
from twinstream.models.recipes.lora import lora_of_attributes
from twinstream.models.recipes.quantized_base import SCALES, BaseFormat, quantized_layout
from twinstream.schedule.ops import Mode


def block_dispatch_backward(
    operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls
) -> None:
    """Write normed rows, the gradients of what comes of them, and what they count, all permuted."""
    block = BlockOperands.of(operands, attributes, vector, calls)
    rows, normed = RoutedRows.take(block), block.take(block.call.spec.d_model)
    d_hidden = block.tokens_by_width("d_hidden")
    d_rows_SD = operands["d_rows"].view(block.call.dtype, tuple(block.sent_rows.shape))
    calls.add(vector.write_normed, block.norm("ffn_norm"), normed, eps=block.call.eps_again)
    write_rows(block, rows, normed)
    calls.add(gather_rows, normed, rows.to, block.sent_rows)
    calls.add(gather_rows, d_hidden, rows.to, d_rows_SD)
    calls.add(write_row_weights, block.routes.weights, rows.to, block.sent_weights)


def experts_forward(
    operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls
) -> None:
    """Turn the rows that came into what their experts make of them."""
    shared = _SharedExperts.of(operands, attributes, vector)
    gate_up_S2F, product_SF = shared.take(2), shared.take(1)
    shared.make_anew(calls)
    calls.add(shared.forward, gate_up_S2F, product_SF)


def experts_backward(
    operands: Operands, attributes: Attributes, vector: VectorOps, calls: Calls
) -> None:
    """Turn gradients of outputs into those of rows, and what rows count into its gradient; add the
    gradients of the experts' weights, those of each rank's rows to a piece of their own if there
    are as many pieces."""
    shared = _SharedExperts.of(operands, attributes, vector)
    pieces = shared.gradients(attributes, calls)
    temporaries = _Temporaries(
        shared.take(2), shared.take(2), shared.take(1),
        shared.workspace.take((shared.num_rows,), torch.float32),
        shared.workspace.take((shared.num_rows,), torch.int64),
    )  # fmt: skip
    shared.make_anew(calls)
    calls.add(shared.backward, pieces, temporaries)


class _Temporaries(NamedTuple):
    """Of as many rows as one rank can send."""

    gate_up: torch.Tensor
    d_gate_up: torch.Tensor
    product: torch.Tensor
    d_weights: torch.Tensor
    places: torch.Tensor


class _Piece(NamedTuple):
    """Where gradients of experts and adapters go; `mode` of the first rows that come there."""

    by_name: dict[str, torch.Tensor]
    mode: Mode


class _OfRank(NamedTuple):
    """The rows that one rank has sent: where they lie, and where those of each expert end."""

    rows: slice
    ends: torch.Tensor


@dataclass(frozen=True)
class _SharedExperts:
    """A rank's experts, and the rows that have come to them."""

    operands: Operands
    vector: VectorOps
    workspace: Workspace
    dtype: torch.dtype
    num_rows: int  # of a chunk, which are the most that a rank sends
    d_model: int
    d_ff: int
    count: int  # of all experts
    own: slice  # of them
    base: BaseFormat
    weights: dict[str, torch.Tensor]  # of a base in few bits temporaries
    adapters: dict[str, torch.Tensor]
    scale: float
    low: torch.Tensor  # [S, rank of adapters], a temporary

    @classmethod
    def of(cls, operands: Operands, attributes: Attributes, vector: VectorOps) -> "_SharedExperts":
        experts, ep = experts_of(attributes), ranks_of_experts(attributes)
        assert experts is not None
        tokens, d_model, first = (
            typed_attribute(attributes, name, int)
            for name in ("num_tokens", "d_model", "first_expert")
        )
        workspace, base = (
            Workspace(operands["scratch"].bytes), base_format(attributes, "experts_base")
        )  # fmt: skip
        dtype = DTYPES[typed_attribute(attributes, "dtype", str)]
        layout = _layout(experts.count // ep, experts.d_ff, d_model, dtype)
        weights = weight_views(operands["experts"], quantized_layout(layout, base), dtype)
        for inner in layout.tensors if base != "model" else ():
            weights[inner.name] = workspace.take(inner.shape, dtype)
        adapters, scale, num_rows = dict[str, torch.Tensor](), 0.0, tokens * experts.per_token
        low = workspace.take((num_rows, 0), dtype)
        if "adapters" in operands and (lora := lora_of_attributes(attributes)) is not None:
            own = _adapters_layout(lora.rank, experts.count // ep, experts.d_ff, d_model, dtype)
            adapters, scale = weight_views(operands["adapters"], own, dtype), lora.scale
            low = workspace.take((num_rows, lora.rank), dtype)
        return cls(
            operands, vector, workspace, dtype, num_rows, d_model, experts.d_ff, experts.count,
            slice(first, first + experts.count // ep), base, weights, adapters, scale, low,
        )  # fmt: skip

    def make_anew(self, calls: Calls) -> None:
        """Write the matrices of a base in few bits from their codes."""
        if self.base == "model":
            return
        coded, table = quantized_layout(self._layout, self.base), levels(self.base, self._device)
        flat = self.operands["experts"]
        for inner in self._layout.tensors:
            codes, scales = coded.tensor(inner.name), coded.tensor(f"{inner.name}{SCALES}")
            calls.add(
                self.vector.write_dequantized,
                flat.view(torch.uint8, (codes.size_bytes,), codes.offset_bytes),
                flat.view(torch.float32, scales.shape, scales.offset_bytes),
                self.weights[inner.name], table,
            )  # fmt: skip

    def forward(self, gate_up_S2F: torch.Tensor, product_SF: torch.Tensor) -> None:
        rows_RD = self._rows("rows")
        for one in self._ranks():
            x, ends = rows_RD[one.rows], one.ends
            gate_up, product = gate_up_S2F[: len(x)], product_SF[: len(x)]
            self._multiply("experts_gate_up", x, ends, gate_up)
            self.vector.write_swiglu(gate_up, product)
            self._multiply("experts_down", product, ends, x)

    def backward(self, pieces: list[_Piece], temporaries: _Temporaries) -> None:
        """As `ExpertsBackward` has it of rows that were not sent."""
        rows_RD, d_rows_RD, vector = self._rows("rows"), self._rows("d_rows"), self.vector
        row_weights_R = self.operands["row_weights"].bytes.view(torch.float32)
        torch.arange(self.num_rows, out=temporaries.places)
        for number, one in enumerate(self._ranks()):
            x, d, counts_R1 = rows_RD[one.rows], d_rows_RD[one.rows], row_weights_R[one.rows, None]
            gate_up, d_gate_up, product, d_weights, places = (t[: len(x)] for t in temporaries)
            d_product, ends = d_gate_up[:, self.d_ff :], one.ends
            self._multiply("experts_gate_up", x, ends, gate_up)
            self._input_gradient("experts_down", d, ends, d_product)
            vector.write_swiglu(gate_up, product)
            vector.weigh_rows(d_product, product, counts_R1, places, d_weights[:, None])
            counts_R1.copy_(d_weights[:, None])
            self._add(pieces, number, "experts_down", (d, product, ends))
            vector.swiglu_backward(gate_up, d_gate_up, None)
            self._add(pieces, number, "experts_gate_up", (d_gate_up, x, ends))
            self._input_gradient("experts_gate_up", d_gate_up, ends, d)

    def _multiply(
        self, name: str, x_RI: torch.Tensor, ends: torch.Tensor, out_RO: torch.Tensor
    ) -> None:
        """As `experts_forward.product` has it."""
        multiply = self.vector.grouped_matmul
        multiply(x_RI, self.weights[name].transpose(1, 2), ends, out_RO)
        if self.adapters:
            low = self._low(name, x_RI, ends)
            multiply(low, self.adapters[f"{name}_b"].transpose(1, 2), ends, out_RO, accumulate=True)

    def _input_gradient(
        self, name: str, d_RO: torch.Tensor, ends: torch.Tensor, out_RI: torch.Tensor
    ) -> None:
        multiply = self.vector.grouped_matmul
        multiply(d_RO, self.weights[name], ends, out_RI)
        if self.adapters:
            d_low = self._low_gradient(name, d_RO, ends)
            multiply(d_low, self.adapters[f"{name}_a"], ends, out_RI, accumulate=True)

    def _low(self, name: str, x_RI: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        low, a_EIR = self.low[: len(x_RI)], self.adapters[f"{name}_a"].transpose(1, 2)
        self.vector.grouped_matmul(x_RI, a_EIR, ends, low, scale=self.scale)
        return low

    def _low_gradient(self, name: str, d_RO: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        d_low = self.low[: len(d_RO)]
        b_EOR = self.adapters[f"{name}_b"]
        self.vector.grouped_matmul(d_RO, b_EOR, ends, d_low, scale=self.scale)
        return d_low

    def gradients(self, attributes: Attributes, calls: Calls) -> list[_Piece]:
        """One for each rank, or one for all: of experts that are trained, and of adapters."""
        count = typed_attribute(attributes, "num_pieces", int)
        found = [_Piece({}, "update") for _ in range(count)]
        layouts = {"expert_gradients": self._layout}
        if (lora := lora_of_attributes(attributes)) is not None and self.adapters:
            own = self.own.stop - self.own.start, self.d_ff, self.d_model, self.dtype
            layouts["adapter_gradients"] = _adapters_layout(lora.rank, *own)
        for name, layout in layouts.items():
            if (flat := self.operands.get(name)) is None:
                continue
            for number, piece in enumerate(flat.bytes.chunk(count)):
                views = gradient_views(KernelOperand(piece, flat.mode), layout, attributes, calls)
                found[number] = _Piece({**found[number].by_name, **views}, flat.mode)
        return found

    def take(self, widths: int) -> torch.Tensor:
        """Room for so many widths of an expert of each row that one rank sends."""
        return self.workspace.take((self.num_rows, widths * self.d_ff), self.dtype)

    def _add(
        self, pieces: list[_Piece], number: int, name: str,
        factors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> None:  # fmt: skip
        piece = pieces[number % len(pieces)]
        mode: Mode = piece.mode if number < len(pieces) else "update"
        add, (d, x, ends) = self.vector.add_grouped_gradient, factors
        if name in piece.by_name:
            add(piece.by_name[name], d, x, ends, mode)
        if self.adapters:
            add(piece.by_name[f"{name}_b"], d, self._low(name, x, ends), ends, mode)
            add(piece.by_name[f"{name}_a"], self._low_gradient(name, d, ends), x, ends, mode)

    def _ranks(self) -> Iterator[_OfRank]:
        """In their order."""
        counts_NE = self.operands["counts"].bytes.view(torch.int32).view(-1, self.count)
        start = 0
        for counts_E in counts_NE[:, self.own]:
            ends = counts_E.cumsum(0, dtype=torch.int32)
            stop = start + int(ends[-1])
            yield _OfRank(slice(start, stop), ends)
            start = stop

    def _rows(self, name: str) -> torch.Tensor:
        """[R, D], and room behind them."""
        return self.operands[name].bytes.view(self.dtype).view(-1, self.d_model)

    @property
    def _device(self) -> torch.device:
        return self.workspace.device

    @property
    def _layout(self) -> FlatLayout:
        return _layout(self.own.stop - self.own.start, self.d_ff, self.d_model, self.dtype)


def _adapters_layout(
    rank: int, count: int, d_ff: int, d_model: int, dtype: torch.dtype
) -> FlatLayout:
    """Of the matrices beside so many experts."""
    shapes = []
    for name, (_, out, inside) in experts_shapes(count, d_ff, d_model):
        shapes += [(f"{name}_a", (count, rank, inside)), (f"{name}_b", (count, out, rank))]
    return packed_layout(shapes, dtype.itemsize)


def _layout(count: int, d_ff: int, d_model: int, dtype: torch.dtype) -> FlatLayout:
    return packed_layout(experts_shapes(count, d_ff, d_model), dtype.itemsize)

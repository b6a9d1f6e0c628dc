"""Calls kernels one by one on buffers of its own, in the order of a training step.

All that a kernel writes or uses as scratch is filled with a byte first, 0xFF (NaN) unless a test
says otherwise, and scratch has exactly the size that the formula says.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tests.helpers.hf_weights import flat_layouts
from twinstream.executor.kernels.operand import KernelOperand
from twinstream.executor.kernels.registry import registered_kernel
from twinstream.executor.kernels.step_state import packed_step_state
from twinstream.executor.run.training import sequences_tensor
from twinstream.models.adapters.lora import Lora
from twinstream.models.kernel_costs.workspace import workspace_bytes
from twinstream.models.loss import CrossEntropy, Dpo
from twinstream.models.lowering.lower import lower
from twinstream.models.options import ROPE_SCALING, RopeScaling
from twinstream.models.recipe import KernelChoice, Recipe
from twinstream.models.spec import ModelSpec
from twinstream.schedule.chain import Task
from twinstream.schedule.ops import TaskOperand
from twinstream.schedule.workload import Packing, Workload

POISON = 0xFF


LLAMA_3_1 = RopeScaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)


def buffer(size_bytes: int, fill: int = POISON) -> torch.Tensor:
    """Bytes that start at a multiple of 256, as in an arena."""
    raw = torch.full((size_bytes + 256,), fill, dtype=torch.uint8)
    start = -raw.data_ptr() % 256
    return raw[start : start + size_bytes]


def run(
    kernel: str, attributes: dict, operands: dict, fill: int = POISON, vector: str = "eager"
) -> None:
    """Call a kernel; operands are (bytes, mode) by name, without scratch."""
    key = f"{kernel}/{vector}"
    operands = {name: KernelOperand(*operand) for name, operand in operands.items()}
    for operand in operands.values():
        if operand.mode == "write":
            operand.bytes.fill_(fill)
    if size_bytes := workspace_bytes(key, attributes):
        operands["scratch"] = KernelOperand(buffer(size_bytes, fill), "scratch")
    with torch.no_grad():
        registered_kernel(key)(operands, attributes)()


def step_state_with(loss_scale: float) -> torch.Tensor:
    """What the head reads of a step; what only the optimizer reads is NaN."""
    nan = float("nan")
    packed = packed_step_state(
        learning_rate=nan, corrections=(nan, nan), weight_decay=nan, step=-1, seed=-1,
        loss_scale=loss_scale,
    )  # fmt: skip
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def block_attributes(spec: ModelSpec, num_tokens: int, seq_len: int, chunk_start: int) -> dict:
    names = (
        "d_model num_heads num_kv_heads head_dim d_ff qk_norm qkv_bias norm_eps rope_theta dtype"
    )
    return {
        **{name: getattr(spec, name) for name in names.split()},
        **{f"{ROPE_SCALING}{name}": value for name, value in spec.rope_scaling or ()},
        "num_tokens": num_tokens,
        "seq_len": seq_len,
        "chunk_start": chunk_start,
        "attention": "eager",
    }


@dataclass
class Step:
    """Forward and backward of `tokens` [2, all tokens] in chunks, by the tasks of their chain.

    A chunk packs sequences of `lengths` where they are given.
    `recompute` is the level that backward starts from: "FULL", "ATTENTION" or "INPUT".
    """

    spec: ModelSpec
    parameters: dict[str, torch.Tensor]
    tokens: torch.Tensor
    chunk_tokens: int
    seq_len: int
    loss_scale: float
    recompute: str = "FULL"
    row_slice: int = 7
    fill: int = POISON
    vector: str = "eager"
    device: str = "cpu"
    gradients_in: str = "model"
    lengths: tuple[int, ...] = ()
    lora: Lora | None = None
    frozen: tuple[str, ...] = ()
    dpo: Dpo | None = None
    reference: torch.Tensor | None = None  # of a chunk's pairs, [chunks, 2, pairs]

    def __post_init__(self) -> None:
        num_chunks = self.tokens.shape[1] // self.chunk_tokens
        work = Workload(
            seq_len=self.seq_len, chunk_tokens=self.chunk_tokens, chunks_per_round=num_chunks,
            rounds_per_step=1, packing=self.packing,
        )  # fmt: skip
        recipe = Recipe(
            kernels=KernelChoice(vector=self.vector), gradients=self.gradients_in, lora=self.lora,
            frozen=self.frozen, loss=self.dpo or CrossEntropy(),
        )  # fmt: skip
        self.chain = lower(self.spec, work, recipe)
        self.layouts = flat_layouts(self.spec)
        self.tensors = {tensor.tensor_id: tensor for tensor in self.chain.tensors}
        self.parts: dict[str, list[str]] = {}
        for tensor in self.chain.tensors:
            self.parts.setdefault(tensor.parent or "", []).append(tensor.tensor_id)

    @property
    def packing(self) -> Packing | None:
        if not self.lengths:
            return None
        expected = (1,) * self.chunk_tokens  # which is another than the data's
        return Packing(most_sequences=self.chunk_tokens, expected_lengths=expected)

    def run(self) -> torch.Tensor:
        """Return the loss; what the kernels leave behind stays in `buffers`."""
        with torch.device(self.device):
            self.buffers = {
                name: buffer(self.tensors[name].size_bytes)
                for name in self.parts[""]
                if self.tensors[name].role not in ("scratch", "optimizer_state")
            }
            self.buffers["step_state"].copy_(step_state_with(self.loss_scale))
            for name, flat in self.parameters.items():
                self.buffers[f"param.{name.removeprefix('layer.')}"].copy_(flat)
            chunks = self.tokens.to(torch.int32).split(self.chunk_tokens, dim=1)
            for number, chunk in enumerate(chunks):
                self.buffers[f"tokens.{number}"].copy_(chunk.reshape(-1).view(torch.uint8))
                if self.packing is not None:
                    packed = sequences_tensor(self.lengths, self.packing.most_sequences)
                    self.buffers[f"sequences.{number}"].copy_(packed.view(torch.uint8))
                if self.reference is not None:
                    told = self.buffers[f"reference.{number}"].view(torch.float32).view(3, -1)
                    given = self.reference[number]
                    told.zero_()[:2, : given.shape[1]] = given
                    told[2, : given.shape[1]] = 1
            for task in self._tasks():
                self._run(task)
        return self.loss

    @property
    def loss(self) -> torch.Tensor:
        return self.buffers["loss"].view(torch.float32)

    @property
    def gradients(self) -> dict[str, torch.Tensor]:
        """The flat gradients, named as the parameters are."""
        found = {n: f"grad.{n.removeprefix('layer.')}" for n in self.parameters}
        return {n: self.buffers[name] for n, name in found.items() if name in self.buffers}

    def _tasks(self) -> Iterator[Task]:
        for task in self.chain.tasks:
            for again in self.chain.recomputes:
                if again.before == task.task_id and again.task.label.level == self.recompute:
                    yield again.task
            if task.label.kind != "optimizer_step":
                yield task

    def _run(self, task: Task) -> None:
        call = self.chain.calls[task.call]
        kernel, vector = call.kernel.split("/")
        attributes = dict(call.attributes)
        if kernel in ("head_loss", "head_dpo"):
            attributes |= {"row_slice": self.row_slice}
        operands = {o.name: (self._view(o), o.mode) for o in task.operands if o.mode != "scratch"}
        run(kernel, attributes, operands, self.fill, vector)

    def _view(self, operand: TaskOperand) -> torch.Tensor:
        tensor = self.tensors[operand.tensor]
        last = tensor
        if operand.num_parts is not None:
            last = self.tensors[self.parts[operand.tensor][operand.num_parts - 1]]
        root = self.buffers[tensor.parent or operand.tensor]
        return root[tensor.offset_bytes : last.offset_bytes + last.size_bytes]

"""Time the executor's own kernels, one unit of the cost model at a time, on random data."""

from collections.abc import Callable, Iterator

import torch

from twinstream.executor.kernels.experts.permutation import (
    Permutation,
    gather_rows,
    write_permutation,
)
from twinstream.executor.kernels.experts.routing import Routes, choose, logit_gradients
from twinstream.executor.kernels.operand import DTYPES, KernelOperand
from twinstream.executor.kernels.registry import registered_kernel
from twinstream.executor.kernels.step_state import packed_step_state
from twinstream.executor.kernels.vector.eager_vector import EagerVector
from twinstream.executor.kernels.vector.rope import Rope
from twinstream.executor.kernels.vector.vector_ops import (
    LogitRows,
    NormGradients,
    RmsNorm,
    VectorGradient,
)
from twinstream.executor.kernels.workspace import Workspace
from twinstream.executor.probe.tasks.task_samples import TaskSample
from twinstream.executor.probe.timing.timing import median_ns
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.kernel_costs.attributes import optimizer_state
from twinstream.models.kernel_costs.expert_work import ExpertWork
from twinstream.models.kernel_costs.scratch_sizes import code_blocks
from twinstream.models.kernel_costs.update_work import with_update_unit
from twinstream.models.kernel_costs.work import ChunkWork, adamw_work, gradient_squares_work
from twinstream.models.kernel_costs.workspace import workspace_bytes
from twinstream.models.options import Experts
from twinstream.models.recipes.recipe import OptimizerState, Recipe
from twinstream.schedule.cost import Work
from twinstream.schedule.ops import Attribute, Mode
from twinstream.schedule.workload import Workload

_EAGER = EagerVector()
_SCRATCH_BYTES = 64 * 2**20
# (tokens, d_model, heads): from a demo's model to a small real one.
_SHAPES = ((128, 128, 4), (256, 256, 4), (512, 512, 8), (1024, 512, 8))


def kernel_samples(dtype: str) -> Iterator[TaskSample]:
    """Every unit of work that the executor's kernels consist of, at several sizes."""
    for tokens, width, heads in _SHAPES:
        case = _Case(dtype, tokens, width, heads)
        yield from case.matmuls()
        yield from case.vectors()
        yield from case.elementwise()
        yield from case.experts()
        yield from case.head()
        yield from case.ends()


def host_update_sample(dtype: str) -> TaskSample:
    """AdamW's update of a large group, as the host's cores make it beside a device."""
    return _Case(dtype, *_SHAPES[-1]).adamw({})


def pace_samples(dtype: str) -> Iterator[TaskSample]:
    """A few of them again, to see whether the machine is as fast as before."""
    case = _Case(dtype, *_SHAPES[1])
    yield from case.matmuls()
    yield from case.vectors()


class _Case:
    """Kernels at one size, and what the cost model says they amount to."""

    def __init__(self, dtype: str, tokens: int, width: int, heads: int) -> None:
        self.spec = ModelSpec(
            name="probe", num_layers=1, d_model=width, num_heads=heads,
            num_kv_heads=heads // 2, head_dim=width // heads, d_ff=3 * width, vocab_size=256,
            dtype="bfloat16" if dtype == "bfloat16" else "float32",
        )  # fmt: skip
        workload = Workload(
            seq_len=tokens, chunk_tokens=tokens, chunks_per_round=1, rounds_per_step=1
        )
        self.work = ChunkWork(self.spec, workload, 0)
        self.tokens = tokens
        self.dtype = DTYPES[dtype]
        self.generator = torch.Generator().manual_seed(tokens + width)
        self.workspace = Workspace(torch.empty(_SCRATCH_BYTES, dtype=torch.uint8))

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def matmuls(self) -> Iterator[TaskSample]:
        """A projection as forward, input gradient and weight gradient run it."""
        t, d, f = self.tokens, self.spec.d_model, 2 * self.spec.d_ff
        x, weight, y = self.random(t, d), self.random(f, d), self.random(t, f)
        forward, d_input = torch.empty_like(y), torch.empty_like(x)
        yield _sample(self.work.matmul(t, f, d), lambda: torch.mm(x, weight.t(), out=forward))
        yield _sample(self.work.matmul(t, d, f), lambda: torch.mm(y, weight, out=d_input))
        yield _sample(
            self.work.matmul(f, d, t, accumulate=True),
            lambda: torch.addmm(weight, y.t(), x, out=weight),
        )

    def vectors(self) -> Iterator[TaskSample]:
        """Time the vector kernels of a block (norms, RoPE, SwiGLU), forward and backward."""
        spec, t = self.spec, self.tokens
        d, f, q, k = spec.d_model, spec.d_ff, spec.d_q, spec.d_kv
        vector = self.work.vector
        x, out, d_x = self.random(t, d), self.random(t, d), self.random(t, d)
        norm = RmsNorm(x=x, weight=self.random(d), rstd=torch.ones(t))
        yield _sample(
            vector("rms_norm", 2 * t * d),
            lambda: _EAGER.write_normed(norm, out, eps=spec.norm_eps),
        )
        gradients = NormGradients(out, d_x, VectorGradient(self.random(d), "update"), True)

        def rms_norm_backward() -> None:
            _EAGER.write_normed(norm, out)
            _EAGER.rms_norm_backward(norm, gradients, self.workspace)

        yield _sample(vector("rms_norm_backward", 6 * t * d, launches=2), rms_norm_backward)
        gate_up, d_gate_up = self.random(t, 2 * f), self.random(t, 2 * f)
        product = d_gate_up[:, :f]
        yield _sample(vector("swiglu", 3 * t * f), lambda: _EAGER.write_swiglu(gate_up, product))

        def swiglu_backward() -> None:
            _EAGER.write_swiglu(gate_up, product)
            _EAGER.swiglu_backward(gate_up, d_gate_up, None)

        yield _sample(vector("swiglu_backward", 6 * t * f, launches=2), swiglu_backward)
        q_THE = self.random(t, spec.num_heads, spec.head_dim)
        k_THE = self.random(t, spec.num_kv_heads, spec.head_dim)
        rope = Rope(spec.rope_theta, spec.head_dim, t, 0)

        def rotate() -> None:
            for heads in (q_THE, k_THE):
                _EAGER.write_rotated(heads, None, rope, heads)

        def rotate_backward() -> None:
            _EAGER.write_rotated(q_THE, None, rope, q_THE)
            for heads in (q_THE, k_THE):
                _EAGER.rotated_backward(heads, rope, None, self.workspace)

        yield _sample(vector("rope", 2 * t * (q + k)), rotate)
        yield _sample(vector("rope_backward", 3 * t * (q + k)), rotate_backward)

    def experts(self) -> Iterator[TaskSample]:
        """Time the routing of rows to experts, and the products of experts one by one."""
        experts = Experts(count=8, per_token=2, d_ff=self.spec.d_model)
        spec = self.spec.model_copy(update={"experts": experts})
        t, d, rows = self.tokens, spec.d_model, 2 * self.tokens
        work = ExpertWork(spec, Recipe(), t)
        x, router = self.random(t, d), self.random(experts.count, d)
        few, of_few = x[:, :8].contiguous(), router[:, :8].contiguous()
        routes = Routes(torch.empty(t, 2, dtype=torch.int32), torch.empty(t, 2))
        to = Permutation.take(self.workspace, rows, experts.count)
        choose(x, router, None, experts, routes)
        write_permutation(routes.chosen, to)
        scores = next(
            one
            for one in work.backward(frozen=True, frozen_experts=True)[1:]
            if one.unit == "router"
        )
        logits = torch.empty(t, experts.count, dtype=self.dtype)
        yield _sample(scores, lambda: logit_gradients(  # whose product is of few columns here
            few, of_few, experts, routes, routes.weights, logits))  # fmt: skip
        order, gather, gate_up, *_ = work.projections()
        yield _sample(order, lambda: write_permutation(routes.chosen, to))
        x_SD, y_SF = self.random(rows, d), self.random(rows, 2 * d)
        yield _sample(gather, lambda: gather_rows(x, to, x_SD))
        matrices = self.random(experts.count, 2 * d, d)
        columns = matrices.transpose(1, 2)
        yield _sample(gate_up, lambda: _EAGER.grouped_matmul(x_SD, columns, to.ends, y_SF))
        gradient = work.weight_gradients(frozen=True, frozen_experts=False)[1]
        yield _sample(
            gradient, lambda: _EAGER.add_grouped_gradient(matrices, y_SF, x_SD, to.ends, "update")
        )
        _, down, combine = work.outputs()
        narrow, out = y_SF[:, :d].contiguous(), self.random(t, d)
        wide = self.random(experts.count, d, d)
        yield _sample(down, lambda: _EAGER.grouped_matmul(narrow, wide, to.ends, x_SD))
        yield _sample(combine, lambda: _EAGER.add_rows(x_SD, routes.weights, to.places, x, out))
        weigh = next(one for one in work.backward(frozen=True, frozen_experts=True)
                     if one.unit == "weigh")  # fmt: skip
        d_weights = torch.empty(t, 2)
        yield _sample(
            weigh, lambda: _EAGER.weigh_rows(narrow, x_SD, routes.weights, to.places, d_weights)
        )

    def elementwise(self) -> Iterator[TaskSample]:
        """Single operations of torch, as modules of other people are made of them."""
        t, d = self.tokens, self.spec.d_model
        x, y = self.random(t, d), self.random(t, d)
        vector = self.work.vector
        yield _sample(vector("vector", 3 * t * d), lambda: x + y)
        yield _sample(vector("vector", 2 * t * d), lambda: torch.nn.functional.silu(x))
        yield _sample(vector("vector", 2 * t * d), lambda: x.softmax(-1))
        half = x[: t // 8]
        yield _sample(vector("vector", 3 * (t // 8) * d), lambda: half * half)
        n, (a, b) = t * d // 128, (16, 8)
        cube, rows, columns = self.random(n, a, b), self.random(n, a, 1), self.random(n, 1, b)
        unit = "vector_narrow"
        yield _sample(vector(unit, n * (a + b + a * b)), lambda: rows * columns)
        yield _sample(vector(unit, n * (a + 2 * a * b)), lambda: rows * cube)
        yield _sample(vector(unit, n * (b + 2 * a * b)), lambda: columns * cube)
        yield _sample(vector(unit, n * (a + a * b)), lambda: cube.sum(-1))
        yield _sample(vector(unit, n * (b + a * b)), lambda: cube.sum(-2))

    def head(self) -> Iterator[TaskSample]:
        """Cross entropy of all rows at once, as of a head that is not sliced."""
        v = self.spec.vocab_size
        rows = LogitRows(
            logits=self.random(self.tokens, v),
            labels=torch.randint(0, v, (self.tokens,), generator=self.generator).int(),
            losses=torch.empty(self.tokens),
            loss_scale=torch.ones(1),
        )
        yield _sample(
            self.work.vector("cross_entropy", 4 * self.tokens * v, launches=2),
            lambda: _EAGER.cross_entropy(rows, self.workspace),
        )

    def ends(self) -> Iterator[TaskSample]:
        """Whole kernels that are one unit: embedding, optimizer."""
        spec, t = self.spec, self.tokens
        common: dict[str, Attribute] = {
            "d_model": spec.d_model, "vocab_size": spec.vocab_size, "dtype": spec.dtype,
            "num_tokens": t,
        }  # fmt: skip
        ids = torch.randint(0, 256, (2, t), generator=self.generator, dtype=torch.int32)
        tokens = _operand(ids, "read")
        table = _operand(self.random(spec.vocab_size, spec.d_model), "read")
        hidden = self.random(t, spec.d_model)
        yield self._kernel(
            "embed_forward", common, self.work.embed_forward(),
            {"parameters": table, "tokens": tokens, "output": _operand(hidden, "write")},
        )  # fmt: skip
        gradients = _operand(self.random(spec.vocab_size, spec.d_model), "update")
        yield self._kernel(
            "embed_backward", common, self.work.embed_backward(),
            {"tokens": tokens, "d_hidden": _operand(hidden, "read"), "gradients": gradients},
        )  # fmt: skip
        yield self.adamw({})
        yield self.adamw({"may_skip": True})
        yield self.adamw({"optimizer_state": "8bit"})
        if self.dtype == torch.float32:  # sums are float32's work, whatever gradients are
            yield self._gradient_squares()

    def _gradient_squares(self) -> TaskSample:
        count = 4 * self.tokens * self.spec.d_model
        operands = {
            "gradients": _operand(self.random(count), "read"),
            "squares": _operand(torch.empty(1), "write"),
        }
        cost = gradient_squares_work(count, self.spec.dtype)
        attributes: dict[str, Attribute] = {"dtype": self.spec.dtype, "num_elements": count}
        return self._kernel("gradient_squares", attributes, cost, operands)

    def adamw(self, more: dict[str, Attribute]) -> TaskSample:
        """With gradients that are clipped, as training does unless told otherwise."""
        count = 4 * self.tokens * self.spec.d_model
        attributes: dict[str, Attribute] = {
            "dtype": self.spec.dtype, "num_elements": count, "element_offset": 0,
            "tensor_seed": 1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8,
            "stochastic_rounding": self.dtype == torch.bfloat16 or "optimizer_state" in more,
            **more,
        }  # fmt: skip
        kind = optimizer_state(attributes)
        state = packed_step_state(
            learning_rate=1e-6, corrections=(0.1, 0.001), weight_decay=1e-4, step=1, seed=1,
            loss_scale=1.0,
        )  # fmt: skip
        operands = {
            "parameters": _operand(self.random(count), "update"),
            "gradients": _operand(self.random(count), "read"),
            "state": _operand(self._moments(kind, count), "update"),
            "step_state": _operand(torch.frombuffer(bytearray(state), dtype=torch.uint8), "read"),
            "norm": _operand(torch.ones(1), "read"),
        }
        cost = with_update_unit(adamw_work(count, self.spec.dtype, state=kind), attributes)
        return self._kernel("adamw_step", attributes, cost, operands)

    def _moments(self, kind: OptimizerState, count: int) -> torch.Tensor:
        if kind != "8bit":
            return self.random(2 * count).abs()
        codes = torch.zeros(2 * count, dtype=torch.uint8)
        scales = torch.full((2 * code_blocks(count),), 1e-3)
        return torch.cat([codes, scales.view(torch.uint8)])

    def _kernel(
        self, name: str, attributes: dict[str, Attribute], cost: tuple[Work, ...],
        operands: dict[str, KernelOperand],
    ) -> TaskSample:  # fmt: skip
        key = f"{name}/eager"
        if size := workspace_bytes(key, attributes):
            scratch = torch.empty(size, dtype=torch.uint8)
            operands = {**operands, "scratch": KernelOperand(bytes=scratch, mode="scratch")}
        return _sample(cost[0], registered_kernel(key)(operands, attributes))


def _operand(tensor: torch.Tensor, mode: Mode) -> KernelOperand:
    return KernelOperand(bytes=tensor.contiguous().view(-1).view(torch.uint8), mode=mode)


def _sample(work: Work, call: Callable[[], object]) -> TaskSample:
    with torch.no_grad():
        return TaskSample(work.unit, (work,), median_ns(call))

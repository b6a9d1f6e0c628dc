"""The scratch formulas against what the kernels take."""

import importlib

import pytest
import torch

from tests.executor.kernels import driver
from tests.executor.kernels.driver import Step
from tests.executor.kernels.families import tiny_spec
from tests.helpers.hf_weights import flat_layouts
from twinstream.executor.kernels.registry import kernel_keys
from twinstream.executor.kernels.workspace import Workspace, WorkspaceExhaustedError
from twinstream.models.kernel_costs.workspace import workspace_bytes
from twinstream.models.layout import ALIGNMENT_BYTES
from twinstream.models.recipes.lora import lora_of
from twinstream.schedule.errors import TwinstreamError

SCRATCH_KERNELS = (
    "block_forward",
    "block_recompute_attention",
    "block_recompute_input",
    "block_backward",
    "head_loss",
    "embed_backward",
)
# Short sequences; queries and keys beyond a tile; sizes that make other buffers the largest.
SHAPES = {
    "packed": (24, 12, {}),
    "tiles": (600, 300, {}),
    "sliced": (100, 600, {}),
    "wide": (24, 12, {"d_ff": 4000, "d_model": 480}),
    "narrow FFN": (24, 12, {"d_ff": 2, "d_model": 2400}),
    "unequal": (313, 300, {}),
}
LENGTHS = {"unequal": (12, 300, 1)}


MODULES = "rms_norm column_sums query_key swiglu cross_entropy token_gradients ordered_sums adamw"


def launch_nothing(monkeypatch) -> None:
    """Workspace is taken before a kernel is launched; what it computes is not asked here."""
    for name in MODULES.split():
        module = importlib.import_module(f"twinstream.executor.kernels.triton_kernels.{name}")
        monkeypatch.setattr(module, "launch", lambda *arguments, **options: None)


def step_of(
    shape: str, family: str, dtype: str, recompute: str, vector: str, **trained: object
) -> Step:
    chunk_tokens, seq_len, sizes = SHAPES[shape]
    spec = tiny_spec(family, dtype).model_copy(update={"num_layers": 1, **sizes})
    generator = torch.Generator().manual_seed(0)
    parameters = {
        name: (0.05 * torch.randn(layout.size_bytes // spec.itemsize, generator=generator))
        .to(getattr(torch, dtype))
        .view(torch.uint8)
        for name, layout in flat_layouts(spec).items()
    }
    num_tokens = max(chunk_tokens, seq_len)
    tokens = torch.randint(0, spec.vocab_size, (2, num_tokens), generator=generator)
    return Step(
        spec, parameters, tokens, chunk_tokens, seq_len, 1.0, recompute=recompute, vector=vector,
        lengths=LENGTHS.get(shape, ()), **trained,
    )  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", "bfloat16"), ("qwen3", "float32"), ("qwen2", "float32")]
)
@pytest.mark.parametrize("level", ["ATTENTION", "INPUT"])
@pytest.mark.parametrize("vector", ["eager", "triton"])
def test_formulas_are_exact(monkeypatch, shape, family, dtype, level, vector):
    """What the formula says is enough, one alignment unit less is too little."""
    step = step_of(shape, family, dtype, level, vector)
    other = {"ATTENTION": "block_recompute_input", "INPUT": "block_recompute_attention"}[level]
    assert run_with_too_little_first(monkeypatch, step) == set(SCRATCH_KERNELS) - {other}


def run_with_too_little_first(monkeypatch, step: Step) -> set[str]:
    """Which kernels ran, each of them once with one unit less than its formula says."""
    vector = step.vector
    if vector == "triton":
        pytest.importorskip("triton")
        launch_nothing(monkeypatch)
    run, tried = driver.run, set()

    def one_unit_less(kernel, attributes):
        return workspace_bytes(kernel, attributes) - ALIGNMENT_BYTES

    def run_twice(kernel, attributes, operands, fill, vector):
        if kernel in SCRATCH_KERNELS:
            tried.add(kernel)
            with monkeypatch.context() as patch, pytest.raises(WorkspaceExhaustedError):
                patch.setattr(driver, "workspace_bytes", one_unit_less)
                run(kernel, attributes, operands, fill, vector)
        run(kernel, attributes, operands, fill, vector)

    monkeypatch.setattr(driver, "run", run_twice)
    step.run()
    return tried


@pytest.mark.parametrize("shape", ["sliced", "wide", "narrow FFN", "unequal"])
@pytest.mark.parametrize("vector", ["eager", "triton"])
@pytest.mark.parametrize(
    "trained",
    [
        {"lora": lora_of("r=5")},
        {"lora": lora_of("r=500,targets=o")},
        {"lora": lora_of("r=300,targets=q,k,down")},
        {"frozen": ("0", "head")},
    ],
    ids=["LoRA", "wide o", "wide down", "frozen"],
)
def test_formulas_of_what_is_frozen_are_exact(monkeypatch, shape, vector, trained):
    step = step_of(shape, "qwen3", "bfloat16", "ATTENTION", vector, **trained)
    tried = run_with_too_little_first(monkeypatch, step)
    assert {"block_backward", "head_loss"} <= tried


def test_every_kernel_has_a_formula_and_unknown_ones_are_named():
    assert workspace_bytes("adamw_step/eager", {}) == 0
    with pytest.raises(TwinstreamError) as raised:
        workspace_bytes("block_forward/cuda", {})
    for key in kernel_keys():
        assert key in str(raised.value)


def test_workspace_aligns_and_frames_give_back():
    workspace = Workspace(driver.buffer(1024))
    first = workspace.take((3,), torch.float32)
    with workspace.frame():
        second = workspace.take((64,), torch.float32)
        assert second.data_ptr() - first.data_ptr() == ALIGNMENT_BYTES
    again = workspace.take((2, 5), torch.bfloat16)
    assert again.data_ptr() == second.data_ptr()
    assert workspace.high_water_bytes == 512
    with pytest.raises(WorkspaceExhaustedError, match=r"needs 1280 bytes.*has 1024"):
        workspace.take((513,), torch.uint8)

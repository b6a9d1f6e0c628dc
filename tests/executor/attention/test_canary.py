"""What a schedule's attention needs is checked before anything runs."""

from dataclasses import replace

import pytest

from tests.helpers.plans import MACHINE, planned
from tests.helpers.tiny_chains import tiny_chain
from twinstream.executor.kernels.attention import canary, registry
from twinstream.executor.kernels.attention.canary import (
    AttentionCanaryError,
    check_attention,
    require_runnable_attention,
)
from twinstream.executor.kernels.attention.registry import (
    AttentionNotAvailable,
    attention_implementation,
    attention_reason,
    available_attention,
    require_attention,
)
from twinstream.models.kernel_costs import attention_libraries
from twinstream.models.kernel_costs.attention_shape import AttentionShape
from twinstream.models.recipe import KernelChoice, Recipe
from twinstream.schedule.document import Caps, RankSchedule

HEADS_OF_300 = AttentionShape(1, 8, 8, 2, 2, 300, "bfloat16", sliced=False)


def schedule_with(attention: str, workload: str = "sliced") -> RankSchedule:
    recipe = Recipe(kernels=KernelChoice(attention=attention))
    return planned(tiny_chain(workload, recipe=recipe), MACHINE, Caps(), "resident")


@pytest.mark.parametrize("of_scores", ["ordinary", "low"])
def test_nan_is_told_with_the_shape_and_what_to_do(monkeypatch, of_scores):
    """Once in a shape only, and once only for scores far below zero."""
    tried = attention_implementation("sdpa_cpu")
    right = tried.backward

    def faulty(inputs, result, gradients, workspace):
        right(inputs, result, gradients, workspace)
        if inputs.k.shape[1] == 48 and (of_scores == "ordinary" or result.lse.min() < -88):
            gradients.d_q[0, -1, -1, -1] = float("nan")

    monkeypatch.setattr(tried, "backward", faulty)
    with pytest.raises(AttentionCanaryError, match=r"'sdpa_cpu'.*in dQ for 1 x 16 queries of 48"):
        check_attention(schedule_with("sdpa_cpu"), "cpu")


def test_low_scores_are_below_where_float32_overflows():
    """exp(88.8) is infinite in float32; a log-sum-exp below -88.7 is where cuDNN has failed."""
    shape = AttentionShape(1, 64, 64, 4, 2, 16, "bfloat16", sliced=False)
    trial = canary.AttentionTrial(
        attention_implementation("eager"), shape, canary.torch.device("cpu")
    )
    trial.lower_scores()
    lse = trial.results().lse
    assert lse[:, :2].max() < -88.8 < lse[:, 2:].min()


def test_one_that_cannot_run_here_says_why_and_which_can():
    told = r"'flash4' cannot run here.*it runs on cuda, not on cpu.*cpu can: eager, sdpa_cpu"
    with pytest.raises(AttentionNotAvailable, match=told):
        require_runnable_attention(schedule_with("flash4"), "cpu")


@pytest.mark.parametrize(
    ("name", "install"),
    [("flash4", "pip install --pre flash-attn-4"), ("flash2", "pip install flash-attn"),
     ("flash3", "build the folder hopper")],
)  # fmt: skip
def test_a_library_that_is_not_installed_is_told_how_to_install(monkeypatch, name, install):
    monkeypatch.setattr(registry, "_cuda_reason", lambda implementation: None)
    with pytest.raises(AttentionNotAvailable, match="is not installed") as raised:
        require_attention(name, "cuda")
    assert install in str(raised.value)
    assert "cuda can: eager, sdpa_flash" in str(raised.value)


def test_a_library_that_is_too_old_is_told_so(monkeypatch):
    monkeypatch.setattr(registry, "_cuda_reason", lambda implementation: None)
    monkeypatch.setattr(attention_libraries, "version", lambda name: "2.6.3.post1")
    assert attention_reason("flash2", "cuda") == (
        "flash-attn is 2.6.3.post1, and 2.7 or newer is needed (pip install flash-attn)"
    )
    monkeypatch.setattr(attention_libraries, "version", lambda name: "2.7.4.post1")
    assert attention_reason("flash2", "cuda") is None


def test_limits_of_shapes_are_told_with_their_numbers(monkeypatch):
    monkeypatch.setattr(registry, "_cuda_reason", lambda implementation: None)
    reason = attention_reason("sdpa_flash", "cuda", HEADS_OF_300)
    assert reason == "head_dim 300 is over its limit of 256"
    assert attention_reason("eager", "cuda", HEADS_OF_300) is None
    odd = replace(HEADS_OF_300, head_dim=12)
    assert attention_reason("sdpa_flash", "cuda", odd) == "head_dim 12 is no multiple of 8"
    wide = replace(HEADS_OF_300, head_dim=64, dtype="float32")
    assert attention_reason("sdpa_flash", "cuda", wide) == "it computes bfloat16, not float32"
    assert available_attention("cuda", wide) == ("eager",)


def test_without_a_cuda_device_nothing_of_cuda_is_available():
    if registry.torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert attention_reason("sdpa_flash", "cuda") == "there is no CUDA device"
    assert available_attention("cpu") == ("eager", "sdpa_cpu")

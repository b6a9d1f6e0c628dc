"""Which kernel set computes a layout: twinstream's own where they can, else Megatron's, priced."""

from twinstream.clusters.job import Job
from twinstream.clusters.layout import Layout, LayoutError
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.recipe import KernelChoice, Recipe
from twinstream.models.spec import ModelSpec, executor_refusal
from twinstream.planner.kernel_choice import attention_for, usual_kernels

_OWN_RECOMPUTE = ("auto", "none", "attention", "full")


def layout_refusal(layout: Layout) -> str | None:
    """Why ranks here cannot run a layout, whatever the model; None if they can."""
    wrong = []
    if layout.tp * layout.cp * layout.ep > 1:
        degrees = {"tp": layout.tp, "cp": layout.cp, "ep": layout.ep}
        split = ", ".join(f"{axis} {size}" for axis, size in degrees.items() if size > 1)
        wrong.append(f"{split} (no kernels here are split over tp, cp or ep)")
    if layout.zero and layout.shards != layout.dp:
        wrong.append(f"ZeRO over {layout.shards} of {layout.dp} replicas (only over all of them)")
    if layout.pipeline == "zero_bubble" and layout.pp > 1:
        wrong.append("zero-bubble (kernels here make both gradients at once)")
    if layout.recompute not in _OWN_RECOMPUTE:
        wrong.append(f"recompute {layout.recompute} (kernels here repeat whole blocks)")
    return "; ".join(wrong) or None


def recipe_refusal(recipe: Recipe) -> str | None:
    """Why nothing here trains by a recipe, whatever the model; None if `run` does."""
    if recipe.kernels is not None and recipe.kernels.vector == "megatron":
        return "the kernel set megatron is priced, and not part of twinstream"
    return None


def run_refusal(spec: ModelSpec, recipe: Recipe, layout: Layout) -> str | None:
    """Why nothing here runs a model by a recipe in a layout; None if `run` does.

    >>> from twinstream.models.presets import load_preset
    >>> run_refusal(load_preset("8b"), Recipe(), Layout(pp=2, dp=2, recompute="full"))
    >>> run_refusal(load_preset("8b"), Recipe(), Layout(tp=2))
    'tp 2 (no kernels here are split over tp, cp or ep)'
    """
    reasons = [recipe_refusal(recipe), executor_refusal(spec), layout_refusal(layout)]
    return "; ".join(reason for reason in reasons if reason) or None


def with_kernels(job: Job, machine: Machine) -> Job:
    """The job with the kernel set that computes its layout.

    Raises:
        LayoutError: the recipe names one of twinstream's own, and that does not.
    """
    named = job.recipe.kernels
    if named is not None and named.vector == "megatron":
        return job
    why_not = run_refusal(job.shape, job.recipe, job.layout)
    if why_not is None:
        chosen = named or usual_kernels(machine, job.shape)
    elif named is not None and not job.any_kernels:
        raise LayoutError(
            f"the kernel set {named.vector} does not compute this layout: {why_not}; leave out "
            "--kernels, or price Megatron's with --kernels megatron"
        )
    elif job.recipe.lora is not None or job.recipe.frozen:
        raise LayoutError(f"with LoRA or frozen weights a layout has to run here: {why_not}")
    else:
        attention = attention_for(machine, job.shape) if named is None else named.attention
        chosen = KernelChoice(vector="megatron", attention=attention, deterministic=False)
    return job.model_copy(update={"recipe": job.recipe.model_copy(update={"kernels": chosen})})


def runs_here(job: Job) -> bool:
    """Whether a job whose kernels are chosen is one that `run` runs."""
    return run_refusal(job.shape, job.recipe, job.layout) is None

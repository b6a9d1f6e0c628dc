"""Which kernel set computes a layout: twinstream's own where they can, else Megatron's, priced."""

from importlib.util import find_spec
from pathlib import Path

from twinstream.hardware_profiles.schema import Machine
from twinstream.models.decoders.parted import parts_refusal as model_parts_refusal
from twinstream.models.kernel_costs.attention_libraries import DeviceName
from twinstream.models.kernel_costs.attention_limits import (
    attention_limits,
    attention_refusal,
)
from twinstream.models.kernel_costs.scratch_sizes import SUM_SHARE_ELEMENTS
from twinstream.models.layout import ALIGNMENT_BYTES
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import Layout, LayoutError
from twinstream.models.loss import CrossEntropy
from twinstream.models.providers.model import AnyModel, model_of
from twinstream.models.recipes.adapter_layout import expert_sites
from twinstream.models.recipes.quantized_base import BLOCK_ELEMENTS, SCALE_BYTES
from twinstream.models.recipes.recipe import USUALLY_NARROW, KernelChoice, Recipe
from twinstream.models.recipes.update_rules import rule_text
from twinstream.planner.kernel_choice import usual_kernels
from twinstream.schedule.document import RankSchedule

_OWN_RECOMPUTE = ("auto", "none", "experts", "attention", "full")


def layout_refusal(layout: Layout) -> str | None:
    """Why ranks here cannot run a layout, whatever the model; None if they can."""
    wrong = []
    if layout.ep > 1 and layout.num_parts > layout.tp:
        wrong.append(
            f"ep {layout.ep} beside {layout.num_parts} parts on tp {layout.tp} (one on each rank)"
        )
    elif layout.ep > 1 and layout.etp not in (None, layout.tp):
        wrong.append(f"ep {layout.ep} of whole experts beside tp {layout.tp} (tp splits them)")
    elif layout.splits_sequences and layout.ep.bit_count() > 1:
        wrong.append(
            f"ep {layout.ep} beside {_in_parts(layout)} (a power of two: sums are of pairs)"
        )
    elif layout.ep > 1 and layout.capacity_factor is not None:
        wrong.append(f"a capacity of {layout.capacity_factor:g} (no row is dropped here)")
    elif layout.ep > 1 and (layout.expert_nodes or 1) > 1:
        wrong.append(f"tokens sent once to each of {layout.expert_nodes} nodes (to ranks, here)")
    elif layout.dp % layout.ep:
        wrong.append(
            f"experts shared by {layout.ep} of {layout.dp} replicas (as many in each group)"
        )
    if layout.token_slices > 1 and layout.splits_sequences:
        wrong.append(
            f"sequence parallelism beside cp {layout.cp} (tokens are split over tp or over cp)"
        )
    if layout.num_parts % layout.tp:
        wrong.append(f"{layout.parts} parts on tp {layout.tp} (as many on each rank)")
    if layout.num_slices % (2 * layout.cp):
        wrong.append(
            f"{layout.cp_parts} parts of a sequence on cp {layout.cp} (as many on each rank)"
        )
    if layout.cp_exchange == "ring" and layout.cp_parts is not None:
        wrong.append(
            f"a ring of {layout.cp_parts} parts of a sequence (each cp merges blocks in another "
            "order: give --cp-exchange all_gather)"
        )
    elif layout.cp_exchange == "ring" and layout.cp == 1:
        wrong.append("a ring of one rank (give --cp N)")
    replicas = layout.dp * layout.cp
    if layout.zero and layout.shards != replicas:
        wrong.append(f"ZeRO over {layout.shards} of {replicas} replicas (only over all of them)")
    if layout.pipeline == "zero_bubble" and layout.pp > 1:
        wrong.append("zero-bubble (kernels here make both gradients at once)")
    if layout.recompute not in _OWN_RECOMPUTE:
        wrong.append(f"recompute {layout.recompute} (kernels here repeat whole blocks)")
    return "; ".join(wrong) or None


def parts_refusal(model: AnyModel, recipe: Recipe, layout: Layout) -> str | None:
    """Why ranks here cannot train a model by a recipe in parts; None if they can, or there are
    none."""
    decoder = model.decoder
    if not layout.in_parts or decoder is None:
        return (
            None if decoder is not None or not layout.in_parts else "other people's code in parts"
        )
    reasons = model_parts_refusal(decoder, layout.num_parts)
    block = BLOCK_ELEMENTS.get(recipe.base, 1)
    # rows that are not cut need whole bytes of scales alone
    unit = block if layout.num_parts > 1 else max(1, block // SCALE_BYTES)
    of_part = [width // layout.num_parts for width in (decoder.d_q, *decoder.ffn_widths.values())]
    beside = {
        "modules that LoRA saves whole": recipe.lora is not None and bool(recipe.lora.saved),
        f"a base in {recipe.base}, of which {block} elements of a row share a scale,": any(
            width % unit for width in (decoder.d_model, *of_part)
        ),
        f"attention {recipe.implementations.attention}, which is causal alone, around a ring": (
            layout.cp_exchange == "ring"
            and attention_limits(recipe.implementations.attention).causal_alone
        ),
        "a loss of pairs": layout.splits_sequences and recipe.loss.sides > 1,
        f"the {recipe.loss.text}": recipe.loss.parts_kernel is None,
        "Muon, whose matrices are whole": recipe.update == "muon",
        "8-bit optimizer state, whose blocks lie across parts": (
            recipe.state_of(model.dtype) == "8bit"
        ),
        "experts with sequence parallelism": decoder.experts is not None
        and layout.token_slices > 1,
    }
    reasons += [
        f"{what} beside {_in_parts(layout)}" for what, is_asked in beside.items() if is_asked
    ]
    return "; ".join(reasons) or None


def experts_refusal(model: AnyModel, recipe: Recipe, layout: Layout) -> str | None:
    """Why ranks here cannot share a model's experts as a recipe trains them; None if they can, or
    do not share any."""
    decoder = model.decoder
    if layout.ep == 1:
        return None
    if decoder is None or decoder.experts is None:  # which the search of layouts says of a decoder
        return "other people's code with shared experts" if decoder is None else None
    experts, ep, groups = decoder.experts, layout.ep, max(1, layout.dp // layout.ep)
    if experts.count % ep:
        return f"{experts.count} experts on {ep} ranks (as many on each)"
    columns = experts.d_ff // layout.num_parts
    sizes = [experts.count // ep * columns * decoder.d_model * n for n in (2, 1)]
    has_adapters = bool(recipe.lora and expert_sites(decoder, recipe.lora))
    split = [] if has_adapters else [size for size in sizes if size % SUM_SHARE_ELEMENTS]
    beside = {
        f"LoRA of experts beside {_in_parts(layout)}": has_adapters and layout.in_parts,
        "clipped gradients of LoRA of experts, whose norm is of all adapters of a layer "
        "(--max-grad-norm 0)": has_adapters and recipe.clips,
        "Muon, whose state is by matrix": recipe.update == "muon",
        "8-bit optimizer state, whose blocks lie across experts": (
            recipe.state_of(model.dtype) == "8bit"
        ),
        f"clipped gradients, whose norm is summed by stretches of {SUM_SHARE_ELEMENTS:,}, and "
        f"{min(split, default=0):,} elements a rank (--max-grad-norm 0)": (
            recipe.clips and bool(split)
        ),
        f"experts of {sizes[1]:,} elements a rank, summed by {groups} ranks,": (
            3 * sizes[1] % groups > 0
        ),
        f"experts of {sizes[1]:,} elements a rank, which do not end at whole {ALIGNMENT_BYTES} "
        "bytes": any(size * model.itemsize % ALIGNMENT_BYTES for size in sizes),
    }
    return (
        "; ".join(f"{what} beside ep {ep}" for what, is_asked in beside.items() if is_asked) or None
    )


def split_refusal(model: AnyModel, recipe: Recipe, layout: Layout) -> str | None:
    """Why ranks here cannot compute the parts of a layout, or share experts; None if they can."""
    asked = model, recipe, layout
    of_layout = layout_refusal(layout) if layout.ep > 1 else None
    return parts_refusal(*asked) or experts_refusal(*asked) or of_layout


def _in_parts(layout: Layout) -> str:
    if layout.parts is not None or not layout.splits_sequences:
        return f"tp {layout.tp}" if layout.parts is None else f"{layout.parts} parts"
    return f"cp {layout.cp}" if layout.cp > 1 else f"{layout.cp_parts} parts of a sequence"


def slices_refusal(job: Job) -> str | None:
    """Why ranks here cannot compute the sequences, or chunks' tokens, of a job in slices; None if
    they can, or there are none."""
    layout = job.layout
    if layout.token_slices > 1 and (tokens := job.workload.chunk_tokens) % layout.token_slices:
        return (
            f"sequence parallelism of {_in_parts(layout)} with chunks of {tokens:,} tokens (they "
            f"need {layout.token_slices} slices of as many; give --chunk-tokens a multiple)"
        )
    if not layout.splits_sequences or not job.num_microbatches:
        return None
    workload, what, count = job.workload, _in_parts(layout), layout.num_slices
    if workload.packing is not None:
        return (
            f"{what} with packed documents (sequences of one length only: data in slices has a "
            "document in each)"
        )
    if workload.chunks_per_sequence % count:
        return (
            f"{what} with sequences of {workload.seq_len:,} tokens in chunks of "
            f"{workload.chunk_tokens:,} (they need {count} slices, each of whole chunks)"
        )
    return None


def cluster_refusal(model: AnyModel, recipe: Recipe, layout: Layout) -> str | None:
    """Why a layout of a cluster is not computed by twinstream's own kernels; None if it is."""
    why_not = run_refusal(model, recipe, layout)
    degrees = {"tp": layout.tp, "cp": layout.cp, "ep": layout.ep}
    split = next((axis for axis, size in degrees.items() if size > 1), None)
    if why_not is None and split is not None:
        return f"{split} runs here with --machine NAME --gpus N, and is priced for clusters"
    return why_not


def recipe_refusal(recipe: Recipe) -> str | None:
    """Why nothing here trains by a recipe, whatever the model; None if `run` does."""
    if recipe.kernels is not None and recipe.kernels.vector == "megatron":
        return "the kernel set megatron is priced, and not part of twinstream"
    return None


def run_refusal(model: AnyModel, recipe: Recipe, layout: Layout) -> str | None:
    """Why nothing here runs a model by a recipe in a layout; None if `run` does.

    >>> from twinstream.models.presets import load_preset
    >>> run_refusal(load_preset("8b"), Recipe(), Layout(pp=2, dp=2, recompute="full"))
    >>> run_refusal(load_preset("8b"), Recipe(), Layout(tp=2, cp=2))
    'sequence parallelism beside cp 2 (tokens are split over tp or over cp)'
    """
    reasons = [
        recipe_refusal(recipe), _model_refusal(model, layout), layout_refusal(layout),
        parts_refusal(model, recipe, layout), experts_refusal(model, recipe, layout),
    ]  # fmt: skip
    return "; ".join(reason for reason in reasons if reason) or None


def _model_refusal(model: AnyModel, layout: Layout) -> str | None:
    reasons = [model.executor_refusal, model.ranks_refusal if layout.num_gpus > 1 else None]
    return "; ".join(reason for reason in reasons if reason) or None


def with_kernels(job: Job, machine: Machine) -> Job:
    """The job with the kernel set that computes its layout.

    Raises:
        LayoutError: the recipe names one of twinstream's own, and that does not; or the layout
            recomputes as only those do; or the model's layers are not alike.
    """
    if job.recipe.loss != CrossEntropy():
        raise LayoutError(
            "layouts of clusters are priced with cross entropy, not with the "
            f"{job.recipe.loss.text}: "
            "plan it with --machine NAME, or --machine NAME --gpus N"
        )
    experts = job.shape.experts
    if job.shape.latent is not None and job.recipe.lora is not None:
        raise LayoutError(
            f"adapters of latent attention, which '{job.shape.name}' has, are not priced: leave "
            "out --lora"
        )
    named = job.recipe.kernels
    is_megatron = named is not None and named.vector == "megatron"
    why_not = cluster_refusal(job.shape, job.recipe, job.layout)
    if job.layout.recompute in ("attention", "experts") and why_not is not None:
        raise LayoutError(
            f"recompute '{job.layout.recompute}' is of twinstream's own kernels, and not for this: "
            f"{why_not}"
        )
    if job.layout.recompute == "experts" and experts is None:
        raise LayoutError(f"recompute 'experts' is of models with experts, not of {job.shape.name}")
    if is_megatron:
        return job
    if why_not is None:
        chosen = named or usual_kernels(machine, job.shape)
    elif named is not None and not job.any_kernels:
        raise LayoutError(
            f"the kernel set {named.vector} does not compute this layout: {why_not}; leave out "
            "--kernels, or price Megatron's with --kernels megatron"
        )
    elif job.recipe.base != "model":
        raise LayoutError(f"with a base in few bits a layout has to run here: {why_not}")
    else:
        attention = "flash" if named is None else named.attention
        chosen = KernelChoice(vector="megatron", attention=attention, deterministic=False)
    return job.model_copy(update={"recipe": job.recipe.model_copy(update={"kernels": chosen})})


def why_not_here(model: AnyModel, recipe: Recipe, layout: Layout) -> str | None:
    """Why `run` does not run a layout on this machine; None where it does."""
    return run_refusal(model, recipe, layout) or machine_refusal(model, recipe, layout.num_gpus)


def why_schedule_not_here(schedule: RankSchedule) -> str | None:
    """Why `run` does not run one device's schedule on this machine; None where it does."""
    if schedule.workload.cache is not None:
        return "it generates text: no kernels keep keys and values from step to step yet"
    return why_not_here(
        model_of(schedule.model), Recipe.model_validate(schedule.recipe), Layout(zero=0)
    )


def machine_refusal(model: AnyModel, recipe: Recipe, num_ranks: int) -> str | None:
    """What this machine lacks to run ranks of twinstream's own kernels; None where nothing.

    Nothing is imported: devices are those that the system lists.
    """
    kernels, num_gpus = recipe.implementations, len(list(Path("/dev").glob("nvidia[0-9]*")))
    if find_spec("torch") is None:
        return "torch is not installed: pip install 'twinstream[executor]'"
    limits = attention_limits(kernels.attention)
    if limits.library is not None and (missing := limits.library.missing()) is not None:
        return f"attention {kernels.attention} needs a library: {missing}"
    if kernels.vector == "triton" and not num_gpus:
        return "Triton's kernels need a CUDA device, and this machine has none"
    if num_gpus and num_ranks > num_gpus:
        return f"{num_ranks} ranks need as many GPUs, and this machine has {num_gpus}"
    if model.head_dim is None:
        return None
    device: DeviceName = "cuda" if num_gpus else "cpu"
    reason = attention_refusal(kernels.attention, device, model.dtype, model.head_dim)
    return None if reason is None else f"attention {kernels.attention}: {reason}"


def recipe_text(spec: AnyModel, recipe: Recipe) -> str:
    """How a model is computed: kernels, dtypes, and what is trained.

    >>> from twinstream.models.presets import load_preset
    >>> recipe_text(load_preset("8b"), Recipe(clips=True))
    'kernels eager, attention eager, bfloat16; gradients and optimizer state in bfloat16; clipped'
    """
    kernels, dtype = recipe.implementations, spec.dtype
    units = "linear layers" if kernels.narrow == USUALLY_NARROW else " ".join(kernels.narrow)
    narrow = "" if kernels.matmuls == "model" else f", {units} in {kernels.matmuls}"
    gradients, state = recipe.gradient_dtype(dtype), recipe.state_of(dtype)
    names = {"model": dtype, "float32_master": "float32 beside a float32 master", "8bit": "8 bits"}
    sums = (
        f"gradients and optimizer state in {dtype}"
        if (gradients, state) == (dtype, "model")
        else f"gradients in {gradients}, optimizer state in {names[state]}"
    )
    attention = spec.attention or kernels.attention
    computed = f"kernels {kernels.vector}, attention {attention}, {dtype}{narrow}"
    if recipe.update != "adamw":
        sums += f"; updates by {rule_text(recipe.update)}"
    if spec.own_code is not None:
        computed = f"{spec.own_code}'s own modules, updates by {computed}"
    parts = [computed, sums]
    parts += [] if recipe.loss.text is None else [recipe.loss.text]
    parts += ["clipped"] if recipe.clips else []
    if recipe.lora is not None:
        parts.append(f"LoRA of rank {recipe.lora.rank}")
    parts += [f"{len(recipe.frozen)} groups frozen"] if recipe.frozen else []
    return "; ".join(parts)

"""The options of the command line that say what to plan."""

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from twinstream.measures.policies_compared import ALL
from twinstream.models.kernel_costs.attention_limits import attention_names
from twinstream.models.update_rules import RULES
from twinstream.planner.policies import policy_names
from twinstream.planner.request import DEFAULT_POLICY

_PLAN, _LIMITS, _FIXED = "What to plan", "Limits", "What to fix of a plan by optimal"


def _option(panel: str, metavar: str, what: str, **more: Any) -> Any:
    return typer.Option(metavar=metavar, help=what, rich_help_panel=panel, **more)


@dataclass(frozen=True)
class PlanOptions:
    """The options that say what to plan; None where one is not given."""

    model: Annotated[
        str | None,
        _option(
            _PLAN, "NAME|FILE", "A preset (`twinstream models`), or a Hugging Face config.json."
        ),
    ] = None
    machine: Annotated[
        str | None,
        _option(_PLAN, "NAME|FILE", "A shipped profile (`twinstream machines`), or a TOML file."),
    ] = None
    seq_len: Annotated[
        str | None,
        _option(
            _PLAN,
            "N[,N...]",
            "Tokens of a sequence, or of unequal ones that are packed together: 300,212,512.",
        ),
    ] = None
    tokens_per_step: Annotated[
        int | None,
        _option(
            _PLAN,
            "N",
            "Tokens of an optimizer step; by default as few as --optimizer-overhead allows.",
            min=1,
        ),
    ] = None
    optimizer_overhead: Annotated[
        str | None,
        _option(
            _PLAN,
            "SHARE",
            "Share of the step that the optimizer may take where --tokens-per-step is not given: "
            "1% (the default) or 0.01.",
        ),
    ] = None
    chunk_tokens: Annotated[
        int | None,
        _option(_PLAN, "N", "Tokens of a chunk: packed sequences or a slice.", min=1),
    ] = None
    chunks_per_round: Annotated[
        int | None,
        _option(_PLAN, "N", "Chunks of a round of gradient accumulation.", min=1),
    ] = None
    device_mem: Annotated[
        str | None,
        _option(_LIMITS, "SIZE", "Cap of device memory: 24GiB, 80% or bytes; by default all."),
    ] = None
    host_mem: Annotated[
        str | None,
        _option(
            _LIMITS,
            "SIZE",
            "Cap of pinned host memory: 75GiB, 80% or bytes; by default 80% beside a GPU.",
        ),
    ] = None
    policy: Annotated[
        str | None,
        _option(
            _LIMITS,
            "NAME",
            f"One of: {', '.join(policy_names())}, or FILE.py:NAME of your own; by default "
            f"{DEFAULT_POLICY}. `plan --policy {ALL}` compares those that cut a step alike (and "
            f"{ALL},FILE.py:NAME yours); -o then writes the fastest.",
        ),
    ] = None
    kernels: Annotated[
        str | None,
        _option(
            _PLAN,
            "NAME",
            "auto (Triton for a CUDA machine, torch's ops for a CPU; Megatron's for layouts that "
            "these do not compute), eager, triton, or megatron (priced, not run).",
        ),
    ] = None
    attention: Annotated[
        str | None,
        _option(
            _PLAN,
            "NAME",
            "auto (what the machine's profile names as usual on its card, else sdpa_flash on CUDA "
            "and eager on a CPU, whatever is installed here), or one of: "
            f"{', '.join(attention_names())}.",
        ),
    ] = None
    nondeterministic: Annotated[
        bool,
        typer.Option(
            "--nondeterministic",
            help="Allow an --attention that does not give the same bits from run to run.",
            rich_help_panel=_PLAN,
        ),
    ] = False
    gradients: Annotated[
        str | None,
        _option(
            _PLAN,
            "DTYPE",
            "What weight gradients are added up in: model (the model's dtype, the default), or "
            "float32.",
        ),
    ] = None
    optim: Annotated[
        str | None,
        _option(
            _PLAN,
            "NAME",
            f"The rule of updates: {', '.join(RULES)}, or FILE.py:FUNCTION of your own, "
            "with states=N behind a comma.",
        ),
    ] = None
    optimizer_state: Annotated[
        str | None,
        _option(
            _PLAN,
            "NAME",
            "m and v in the model's dtype (model, the default), in float32 beside float32 "
            "parameters (float32_master), or 8bit.",
        ),
    ] = None
    clips: Annotated[
        bool,
        typer.Option(
            "--clips",
            help="Gradients are clipped to a norm, as `train` does: all updates wait for it.",
            rich_help_panel=_PLAN,
        ),
    ] = False
    loss: Annotated[
        str | None,
        _option(
            _PLAN,
            "dpo|FILE.py:FUNCTION",
            "dpo, with beta=0.1 and label_smoothing=0 behind commas, of pairs of sequences of "
            "--seq-len. Or a loss of your own: of logits [R, V] and labels [R] one of each row; "
            "the model runs by its own code then.",
        ),
    ] = None
    aux_loss: Annotated[
        float | None,
        typer.Option(
            "--aux-loss", metavar="X", min=0.0, max=1e3, rich_help_panel=_PLAN,
            help="What the load-balancing loss of experts counts; else as config.json has it.",
        ),
    ] = None  # fmt: skip
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code", rich_help_panel=_PLAN,
            help="Run the Python files in the model's folder; read them first.",
        ),
    ] = False  # fmt: skip
    lora: Annotated[
        str | None,
        _option(
            _PLAN,
            "OPTIONS",
            "Freeze the model and train adapters beside its projections: r=16, and behind "
            "commas alpha=32 and targets=q,k,v,o with gate, up, down, of which any may be left out "
            "(but not all).",
        ),
    ] = None
    freeze: Annotated[
        list[str] | None,
        _option(
            _PLAN,
            "PATTERN",
            "Do not train weights whose Hugging Face names match, as 'model.layers.[0-3].*'; whole "
            "layers, embedding or head. May be given again.",
        ),
    ] = None
    base: Annotated[
        str | None,
        _option(
            _PLAN,
            "8bit|nf4",
            "Keep the matrices of frozen blocks in few bits (8.125 or 4.5 each); of others none.",
        ),
    ] = None
    dtype: Annotated[
        str | None,
        _option(
            _PLAN,
            "NAME",
            "Dtype of parameters and activations, bfloat16 or float32; by default the model's.",
        ),
    ] = None
    home: Annotated[
        list[str] | None,
        _option(
            _FIXED,
            "KIND=WHERE",
            "Where a kind of tensor is at home, again for each: parameter, gradient, "
            "optimizer_state or activation = device or host.",
        ),
    ] = None
    recompute: Annotated[
        str | None,
        _option(
            _FIXED,
            "NAME",
            "none; full (every block from its input); attention (all but attention); of the "
            "kernel set megatron also selective (attention's core) and mlp. By default as little "
            "as fits.",
        ),
    ] = None
    prefetch: Annotated[
        float | None,
        _option(
            _FIXED,
            "BLOCKS",
            "Load at most so long before the first use, in times of the longest task.",
        ),
    ] = None
    optimizer: Annotated[
        str | None,
        _option(
            _FIXED,
            "WHEN",
            "device (each group as soon as its gradients are there, the default) or "
            "device_after_backward.",
        ),
    ] = None
    effort: Annotated[
        str | None,
        _option(
            _FIXED, "NAME", "quick (one cut of the step, simulated once) or normal (the default)."
        ),
    ] = None

    def given(self) -> list[str]:
        """The flags that are set, but for --machine."""
        names = [name for name, value in vars(self).items() if value not in (None, False)]
        return [f"--{name.replace('_', '-')}" for name in names if name != "machine"]

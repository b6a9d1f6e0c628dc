"""`trace`: a model as data, without its weights; or a schedule's timelines for trace viewers."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from twinstream.commands.arguments import options
from twinstream.commands.arguments.grouped import grouped
from twinstream.commands.arguments.outputs import output_option
from twinstream.commands.output import print_json, print_report, progress
from twinstream.commands.schedule_inputs import inputs_of
from twinstream.models.hf.config import DTYPES
from twinstream.models.model import length_refusal
from twinstream.models.traced import TracedModel
from twinstream.planner.choices import require_known
from twinstream.planner.planner import gc_paused
from twinstream.schedule.analysis.comparison import by_rank
from twinstream.schedule.errors import ArgumentError
from twinstream.schedule.files import write_document
from twinstream.tracing import DEFAULT_SEQ_LEN, trace_model

_TIMELINES, _MODEL = "trace.json.gz", "model.json"


@dataclass(frozen=True)
class TraceOptions:
    """How a model is traced."""

    dtype: Annotated[
        str | None,
        typer.Option(metavar="DTYPE", help="Dtype of a model's parameters: bfloat16 or float32."),
    ] = None
    attention: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Attention of a model: eager or sdpa; by default transformers'."
        ),
    ] = None
    seq_len: Annotated[
        int | None,
        typer.Option(
            min=2, metavar="N",
            help=f"Tokens of a model's sequences, by default {DEFAULT_SEQ_LEN}; longer and shorter "
            "ones are good as far as no attention window separates them.",
        ),
    ] = None  # fmt: skip
    lora: Annotated[
        str | None,
        typer.Option(
            metavar="OPTIONS",
            help="Adapters beside linear layers of a model's blocks, all or those named: "
            "r=16,alpha=32,targets=q_proj,v_proj.",
        ),
    ] = None
    loss: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:FUNCTION",
            help="A loss of your own: of logits [R, V] and labels [R] a loss of each row.",
        ),
    ] = None
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code",
            help="Run the Python files in the model's folder; read them first.",
        ),
    ] = False
    packed: Annotated[
        bool, typer.Option("--packed", help="Documents are packed side by side in a chunk.")
    ] = False


@dataclass(frozen=True)
class Timelines(options.Profiles):
    """A schedule's timelines, and on what it is simulated."""

    predicted: options.Predicted = None
    measured: options.Measured = None


@grouped()
def trace(
    what: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|SCHEDULE",
            help="A Hugging Face folder, its config.json, FILE.py:FUNCTION; or a schedule's JSON.",
        ),
    ],
    model: TraceOptions,
    timelines: Timelines,
    output: Annotated[
        Path | None,
        output_option(f"Write here; by default {_MODEL}, of a schedule {_TIMELINES} (compressed)."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Write what planning needs of any model, without its weights; or a schedule's timelines.

    A model's own code is run once on tensors without memory; its file is then given wherever a
    --model is asked for, also where torch is not installed. Of a schedule streams, waits and memory
    become a trace for ui.perfetto.dev or chrome://tracing: without --predicted it is simulated, and
    of a cluster's schedule every class is a process.
    """
    if _is_schedule(what):
        if model != TraceOptions():
            raise ArgumentError(
                f"{what} is a schedule: --dtype, --attention, --seq-len, --lora, --loss, "
                "--trust-remote-code and --packed are of models"
            )
        _trace_timelines(Path(what), timelines, output, as_json=as_json)
        return
    if timelines != Timelines():
        raise ArgumentError(
            f"{what} is a model: --machine, --cluster, --straggler, --predicted and --measured are "
            "of schedules"
        )
    require_known("--dtype", model.dtype, tuple(DTYPES))
    require_known("--attention", model.attention, ("eager", "sdpa"))
    with progress(f"tracing {what}", quiet=as_json):
        found = trace_model(
            what, dtype=None if model.dtype is None else DTYPES[model.dtype],
            attention=model.attention, seq_len=model.seq_len, is_packed=model.packed,
            lora=model.lora, loss=model.loss, trust_remote_code=model.trust_remote_code,
        )  # fmt: skip
    if model.seq_len is not None and (why := length_refusal(found, model.seq_len)) is not None:
        raise ArgumentError(why)
    output = output or Path(_MODEL)
    write_document(found, output)
    if as_json:
        print_json({"output": output, "size_bytes": output.stat().st_size} | _summary(found))
    else:
        print_report(*_lines(found), f"Wrote {output}; give it to plan, whatif, sweep, explore.")


def _is_schedule(what: str) -> bool:
    """Whether a path is that of a JSON document that is no model's config."""
    path = Path(what)
    if not path.is_file() or path.suffix != ".json":
        return False
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and not {"model_type", "architectures"} & set(content)


def _summary(model: TracedModel) -> dict[str, object]:
    longest = model.positions.tokens if model.positions else DEFAULT_SEQ_LEN
    length = min(DEFAULT_SEQ_LEN, longest, model.max_seq_len or DEFAULT_SEQ_LEN)
    length = max(model.min_seq_len, length)
    return {
        "name": model.name, "model_type": model.model_type, "dtype": model.dtype,
        "attention": model.attention, "num_parameters": model.num_parameters,
        "num_blocks": model.num_layers, "num_kinds": len(model.kinds),
        "seq_len": length, "training_flops": model.training_flops(1, length),
        "packing": model.packing, "notes": list(model.notes),
    }  # fmt: skip


def _lines(model: TracedModel) -> list[str]:
    about, limit = _summary(model), model.positions
    kinds = ", ".join(dict.fromkeys(kind.name for kind in model.kinds))
    seq_len = about["seq_len"]
    return [
        f"{model.name}: {model.num_parameters:,} parameters in {model.num_layers} blocks of "
        f"{len(model.kinds)} kind{'s' if len(model.kinds) > 1 else ''} ({kinds}), {model.dtype}, "
        f"attention {model.attention}.",
        f"A sequence of {seq_len:,} tokens takes {about['training_flops']:.4g} FLOPs to train on.",
        *([] if limit is None else [f"Sequences have up to {limit.tokens:,} tokens: {limit.why}."]),
        *([] if model.unread_told is None else [f"Its {model.unread_told}."]),
        *model.notes,
    ]


def _trace_timelines(
    schedule: Path, wanted: Timelines, output: Path | None, *, as_json: bool
) -> None:
    from twinstream.report.trace import trace_of, write_trace
    from twinstream.report.view import MeshView

    output = output or Path(_TIMELINES)
    with progress(f"tracing {schedule}", quiet=as_json), gc_paused():
        inputs = inputs_of(schedule, wanted)
        views = [MeshView("predicted", inputs.schedule, inputs.timeline(wanted.predicted))]
        if (after := inputs.measured(wanted.measured)) is not None:
            views.append(MeshView("measured", *by_rank(inputs.schedule, after)))
        found = trace_of(views)
        write_trace(found, output)
    size_bytes, about = output.stat().st_size, found["otherData"]
    if as_json:
        num_events = len(found["traceEvents"])
        print_json({"output": output, "size_bytes": size_bytes, "num_events": num_events} | about)
    else:
        print_report(
            *(f"{view.world}: {about[view.world]}" for view in views),
            *inputs.told,
            f"Wrote {output}, {size_bytes / 1e6:.1f} MB; open it in ui.perfetto.dev.",
        )

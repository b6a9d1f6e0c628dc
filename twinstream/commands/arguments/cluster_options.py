"""The options of the command line that lay a model out on a cluster."""

from dataclasses import dataclass
from typing import Annotated, Any, cast, get_args

import typer

from twinstream.clusters.job import Job, Precision
from twinstream.clusters.layout import Layout, LayoutError, Pipeline, Recompute
from twinstream.clusters.search.question import Question
from twinstream.commands.arguments.plan_options import PlanOptions
from twinstream.commands.arguments.price_options import RunOptions
from twinstream.hardware_profiles.clusters.loader import load_cluster
from twinstream.models.presets import load_model

_PANEL, _FIXED = "On a cluster", "What to fix of a layout"
_PIPELINES = ", ".join(get_args(Pipeline))


def _option(panel: str, metavar: str, what: str, **more: Any) -> Any:
    return typer.Option(metavar=metavar, help=what, rich_help_panel=panel, **more)


def _degree(what: str) -> Any:
    return _option(_FIXED, "N", what, min=1)


@dataclass(frozen=True)
class RanksOptions:
    """How ranks that run are laid out; None where it is left open."""

    pp: Annotated[int | None, _degree("Pipeline stages.")] = None
    dp: Annotated[int | None, _degree("Data parallel replicas.")] = None
    virtual_stages: Annotated[int | None, _degree("Virtual stages of a rank.")] = None
    pipeline: Annotated[
        str | None, _option(_FIXED, "NAME", f"Order of the pipeline: {_PIPELINES}.")
    ] = None
    zero: Annotated[
        int | None,
        _option(
            _FIXED, "STAGE", "Sharded over replicas: 0 nothing, 1 state, 2 gradients too, 3 all.",
            min=0, max=3,
        ),
    ] = None  # fmt: skip

    reduction: Annotated[
        str | None,
        _option(
            _FIXED, "NAME", "How ranks that run sum gradients of replicas: rank_order (the same "
            "bits on any transport; the default) or library (the transport's own sums).",
        ),
    ] = None  # fmt: skip

    def given(self) -> list[str]:
        """The flags that are set."""
        names = [name for name, value in vars(self).items() if value not in (None, False)]
        return [f"--{name.replace('_', '-')}" for name in names if name != "keep"]


@dataclass(frozen=True)
class ClusterOptions(RanksOptions):
    """What to lay out on how many GPUs, and what is not left open; None where one is not given."""

    cluster: Annotated[
        str | None,
        _option(
            _PANEL,
            "NAME|FILE",
            "Search layouts on this cluster (`twinstream clusters`), or a TOML file; instead of "
            "--machine.",
        ),
    ] = None
    gpus: Annotated[int | None, _option(_PANEL, "N", "GPUs to lay out on.", min=1)] = None
    global_batch: Annotated[
        int | None, _option(_PANEL, "N", "Sequences of a training step.", min=1)
    ] = None
    precision: Annotated[
        str | None, _option(_PANEL, "NAME", "bf16 (the default), fp16, fp8 or fp4.")
    ] = None
    offload: Annotated[
        bool,
        typer.Option(
            "--offload",
            help="Let the planner keep what does not fit in host memory, rank class by rank class.",
            rich_help_panel=_PANEL,
        ),
    ] = False
    keep: Annotated[
        int, _option(_PANEL, "N", "How many of the best layouts are shown.", min=1, max=20)
    ] = 3
    tp: Annotated[int | None, _degree("Tensor parallel ranks.")] = None
    cp: Annotated[int | None, _degree("Context parallel ranks.")] = None
    ep: Annotated[int | None, _degree("Replicas that share the routed experts.")] = None
    micro_batch: Annotated[int | None, _degree("Sequences of a microbatch.")] = None

    def question(self, wanted: PlanOptions) -> Question:
        """What is searched.

        Raises:
            TwinstreamError: an option is missing, unknown, or of one device alone.
        """
        job, fixed = self.job(wanted), self.fixed(wanted)
        assert self.cluster is not None and self.gpus is not None
        return Question(job, self.gpus, load_cluster(self.cluster), fixed)

    def job(self, wanted: PlanOptions) -> Job:
        """Model, batch and precision; the layout is the smallest there is.

        Raises:
            TwinstreamError: something is missing, unknown, or of one device alone.
        """
        missing = [
            f"--{name.replace('_', '-')}"
            for name in ("gpus", "global_batch")
            if getattr(self, name) is None
        ]
        if missing:
            raise LayoutError(
                f"--cluster needs {' and '.join(missing)}: GPUs to lay out on, sequences of a step"
            )
        given = [*wanted.given(), *(["--machine"] if wanted.machine is not None else [])]
        if beside := [flag for flag in given if flag not in _OF_BOTH]:
            raise LayoutError(f"{', '.join(beside)} is of one device; leave out it or --cluster")
        precision = self.precision or "bf16"
        if precision not in get_args(Precision):
            raise LayoutError(
                f"unknown precision '{precision}'; known: {', '.join(get_args(Precision))}"
            )
        assert wanted.model is not None and wanted.seq_len is not None
        if not wanted.seq_len.isdigit() or not int(wanted.seq_len):
            raise LayoutError(
                f"--seq-len {wanted.seq_len!r} is no number of tokens; on a cluster all "
                "sequences are as long"
            )
        assert self.global_batch is not None
        return Job(
            shape=load_model(wanted.model, dtype="bfloat16", longest=int(wanted.seq_len)),
            layout=Layout(),
            seq_len=int(wanted.seq_len), global_batch=self.global_batch,
            precision=cast(Precision, precision),
        )  # fmt: skip

    def fixed(self, wanted: PlanOptions) -> dict[str, Any]:
        """Fields of the layout that are not left open.

        Raises:
            LayoutError: there is no such pipeline, or no such recomputation.
        """
        names = ("tp", "cp", "pp", "dp", "ep", "virtual_stages", "micro_batch", "pipeline", "zero")
        found = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.reduction is not None:
            raise LayoutError("--reduction is of ranks that run: leave it out, or add --ranks N")
        require_known("--pipeline", self.pipeline, get_args(Pipeline))
        require_known("--recompute", wanted.recompute, get_args(Recompute))
        if wanted.recompute is not None:
            found["recompute"] = wanted.recompute
        if wanted.gradients is not None:
            require_known("--gradients", wanted.gradients, ("float32", "model"))
            found["gradient_dtype"] = "float32" if wanted.gradients == "float32" else "bfloat16"
        if self.offload:
            found["offload"] = True
        return found


def require_machine(
    command: str, wanted: PlanOptions, asked: ClusterOptions, charged: RunOptions
) -> None:
    """Refuse what is of a cluster, where none is given.

    Raises:
        LayoutError: says what to add.
    """
    if beside := [*asked.given(), *charged.given()]:
        raise LayoutError(f"{', '.join(beside)} is of a cluster's layout: add --cluster")
    if wanted.machine is None:
        raise LayoutError(f"{command} needs --machine (one device), or --cluster with --gpus")


_OF_BOTH = ("--model", "--seq-len", "--recompute", "--gradients")


def require_known(flag: str, name: str | None, known: tuple[str, ...]) -> None:
    """Refuse a name that an option does not know.

    Raises:
        LayoutError: it is none of these.
    """
    if name is not None and name not in known:
        raise LayoutError(f"{flag} {name!r} is unknown; known: {', '.join(known)}")

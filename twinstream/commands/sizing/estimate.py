"""`estimate`: what a step takes on a cluster, by how each class of layers is spread."""

from dataclasses import dataclass
from typing import Annotated, get_args

import typer

from twinstream.commands.arguments.grouped import grouped
from twinstream.commands.arguments.options import Json
from twinstream.commands.output import print_json, print_report
from twinstream.hardware_profiles.clusters.loader import load_cluster
from twinstream.layered.estimate import Question, estimate_document, mesh_of
from twinstream.layered.step import LayeredTask, TaskName
from twinstream.layered.strategy import parse_strategy
from twinstream.models.layered.from_decoder import layered_decoder
from twinstream.models.layered.model import LayeredModel, layered_names, load_layered
from twinstream.models.presets import load_model
from twinstream.schedule.errors import ArgumentError
from twinstream.screens.estimate_screen import estimates_screen, layered_table


@dataclass(frozen=True)
class LayeredStep:
    """The options that say where and what is done."""

    cluster: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="The cluster, as `twinstream clusters` has it.")
    ] = "a100_dgx"
    gpus: Annotated[int, typer.Option(min=1, metavar="N", help="GPUs, full nodes of them.")] = 8
    batch_size: Annotated[
        int,
        typer.Option(
            min=1, max=2**31, metavar="N", help="Samples of a step, of all GPUs together."
        ),
    ] = 4096
    seq_len: Annotated[
        int | None,
        typer.Option(
            min=1, max=2**31, metavar="N", help="Of a decoder: tokens of a sequence, its sample."
        ),
    ] = None
    task: Annotated[
        str, typer.Option(metavar="TASK", help="pretrain, finetune (with --freeze) or inference.")
    ] = "pretrain"
    freeze: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A layer or class that is not trained; repeatable."),
    ] = None
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Backward computes every layer again.")
    ] = False

    def model(self, name: str) -> LayeredModel:
        """Return a layered model, or with a length of sequences a decoder.

        Raises:
            TwinstreamError: there is none of the name, or it is not supported.
        """
        if self.seq_len is None:
            return load_layered(name)
        return layered_decoder(load_model(name, longest=self.seq_len), self.seq_len)

    def asked(self, model: LayeredModel) -> LayeredTask:
        """Return the task of a model.

        Raises:
            ArgumentError: options contradict each other, or speak of what is not there.
        """
        names: tuple[TaskName, ...] = get_args(TaskName)
        name = next((one for one in names if one == self.task), None)
        frozen = frozenset(self.freeze or ())
        if name is None:
            known = ", ".join(names)
            raise ArgumentError(f"--task {self.task!r:.30} is unknown; known: {known}")
        if unknown := sorted(frozen - set(model.names)):
            has = ", ".join(model.names)
            raise ArgumentError(f"--freeze {unknown[0]:.60}: {model.name} has {has}")
        if frozen and name != "finetune":
            raise ArgumentError(f"--freeze is of --task finetune, not of {name}")
        if name == "finetune" and not frozen:
            raise ArgumentError("--task finetune needs --freeze: say what is not trained")
        return LayeredTask(self.batch_size, name, frozen, recompute=self.recompute)


@grouped()
def estimate(
    step: LayeredStep,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="A name (dlrm_a, vit_h, bert_base; without one all are listed), a TOML or JSON "
            "file with its layers, or with --seq-len a decoder as `plan` takes it.",
        ),
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=WAY[/WAY],...",
            help="Ways by layer or class, over all GPUs, or inside a node / between nodes: "
            "embedding=shard,dense=fsdp/ddp. Ways: ddp, fsdp, tp; of embeddings shard (or tp), "
            "ddp. What is not given is searched, unless --as-given.",
        ),
    ] = None,
    as_given: Annotated[
        bool,
        typer.Option("--as-given", help="No search: this strategy alone, whether or not it fits."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Estimate a step on a cluster by strategy: each class of layers may be spread its own way.

    Arithmetic over layers, on two streams: compute, and one collective at a time beside it. For
    decoders, `plan --cluster` knows pipelines, kernels and schedules, with one way for all blocks.
    """
    if model is None:
        _list(as_json)
        return
    found, cluster = step.model(model), load_cluster(step.cluster)
    asked = Question(found, cluster, mesh_of(cluster, step.gpus), step.asked(found))
    wanted = {} if strategy is None else parse_strategy(strategy, found)
    answers = (asked.estimate(wanted),) if as_given else asked.search(wanted)
    if as_json:
        print_json(estimate_document(asked, answers))
    else:
        print_report(estimates_screen(asked, answers))


def _list(as_json: bool) -> None:
    models = [load_layered(name) for name in layered_names()]
    if as_json:
        sizes = [one.model_dump() | {"parameters": one.parameters} for one in models]
        print_json({"models": sizes})
    else:
        print_report(layered_table(models))

"""The options of `cost time`, named as davidsj/ml_par_sim names them."""

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from twinstream.cost.refusal import made
from twinstream.cost.time.batch import Setting
from twinstream.cost.time.chips import chip_names, load_chip
from twinstream.cost.time.plan import Cut, Layout, Stack

_MODEL, _RUN, _CHIPS, _LAYOUT = "Model", "Run", "Chips", "Layout"


def _size(panel: str, what: str) -> Any:
    return typer.Option(min=1, metavar="N", help=what, rich_help_panel=panel)


def _other(panel: str, metavar: str, what: str, *names: str) -> Any:
    return typer.Option(*names, metavar=metavar, help=what, rich_help_panel=panel)


@dataclass(frozen=True)
class TimeOptions:
    """Model, run, chips and layout."""

    n_layers: Annotated[int, _size(_MODEL, "Layers.")]
    d_model: Annotated[int, _size(_MODEL, "Width between layers.")]
    d_internal_ratio: Annotated[
        int, _size(_MODEL, "Inner width (feed-forward and heads together) over --d-model.")
    ] = 5
    n_experts: Annotated[
        int, _size(_MODEL, "Experts of a layer, and groups of chips for them.")
    ] = 1
    n_routed_experts: Annotated[int, _size(_MODEL, "Experts that a token passes.")] = 1
    dataset_size: Annotated[
        float | None, _other(_RUN, "TOKENS", "Tokens of the run; by default 20 a parameter.")
    ] = None
    batch_size: Annotated[int, _size(_RUN, "Sequences of an optimizer step.")] = 2048
    microbatch_size: Annotated[
        int, _size(_RUN, "Sequences in a stage at a time, over all replicas.")
    ] = 1
    seq_len: Annotated[int, _size(_RUN, "Tokens of a sequence.")] = 2048
    precision_bits: Annotated[
        int,
        typer.Option(
            min=1, max=1024, metavar="BITS", help="Of what is multiplied and sent.",
            rich_help_panel=_RUN,
        ),
    ] = 8  # fmt: skip
    chip_type: Annotated[
        str,
        _other(
            _CHIPS,
            "NAME|FILE",
            f"One of: {', '.join(chip_names())}; or a TOML file.",
            "--chip",
            "--chip-type",
        ),
    ] = "H100"
    network_bandwidth: Annotated[
        float | None,
        _other(_CHIPS, "BYTES/S", "Both ways together; by default the chip's."),
    ] = None
    base_utilization: Annotated[
        float,
        _other(_CHIPS, "SHARE", "Share of the peak that one matmul on one chip reaches."),
    ] = 0.6
    pp: Annotated[int, _size(_LAYOUT, "Pipeline stages.")] = 1
    pipeline_interleaving: Annotated[int, _size(_LAYOUT, "Runs of layers of a stage.")] = 1
    dp: Annotated[int, _size(_LAYOUT, "Replicas.")] = 1
    tp: Annotated[int, _size(_LAYOUT, "Parts of the inner width.")] = 1
    tp2: Annotated[int, _size(_LAYOUT, "Parts of the width between layers.")] = 1

    def setting(self) -> Setting:
        """
        Raises:
            CostError: a number is none, or the chip is unknown.
        """
        chip = load_chip(self.chip_type)
        if self.network_bandwidth is not None:
            chip = chip.with_network(self.network_bandwidth)
        given = {
            "stack": self._stack(),
            "cut": self._cut(),
            "layout": self._layout(),
            "chip": chip,
            "precision_bits": self.precision_bits,
            "base_utilization": self.base_utilization,
        }
        return made(Setting, given, {})

    def _stack(self) -> Stack:
        given = {
            "num_layers": self.n_layers,
            "d_model": self.d_model,
            "d_internal_ratio": self.d_internal_ratio,
            "num_experts": self.n_experts,
            "num_routed": self.n_routed_experts,
        }
        return made(Stack, given, {"num_layers": "--n-layers", "num_experts": "--n-experts"})

    def _cut(self) -> Cut:
        given = {
            "batch_size": self.batch_size,
            "microbatch_size": self.microbatch_size,
            "seq_len": self.seq_len,
            "dataset_tokens": self.dataset_size,
        }
        return made(Cut, given, {"dataset_tokens": "--dataset-size"})

    def _layout(self) -> Layout:
        given = {
            "pp": self.pp,
            "interleaving": self.pipeline_interleaving,
            "dp": self.dp,
            "tp": self.tp,
            "tp2": self.tp2,
        }
        return made(Layout, given, {"interleaving": "--pipeline-interleaving"})

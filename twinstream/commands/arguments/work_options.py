"""The options of `cost work`, named as davidsj/ml_par_sim names them."""

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from twinstream.cost.refusal import made
from twinstream.cost.work.decoder import Batches, Decoder, feed_forward_width, heads_of
from twinstream.cost.work.mesh import Axis, Mesh
from twinstream.cost.work.run import Counting

_MODEL, _RUN, _MESH, _COUNT = "Model", "Run", "Mesh", "How it is counted"


def _size(panel: str, what: str) -> Any:
    return typer.Option(min=1, metavar="N", help=what, rich_help_panel=panel)


def _rate(panel: str, metavar: str, what: str) -> Any:
    return typer.Option(metavar=metavar, help=what, rich_help_panel=panel)


def _flag(panel: str, name: str, what: str) -> Any:
    return typer.Option(name, help=what, rich_help_panel=panel)


@dataclass(frozen=True)
class WorkOptions:
    """Model, run, mesh, and how they are counted."""

    num_layers: Annotated[int, _size(_MODEL, "Layers.")]
    d_model: Annotated[int, _size(_MODEL, "Width between layers.")]
    dataset_size: Annotated[float, _rate(_RUN, "TOKENS", "Tokens of the run: 13e12.")]
    d_ffn: Annotated[
        int | None, _size(_MODEL, "Inner width of the feed-forward network; 4 times --d-model.")
    ] = None
    d_ffn_ratio: Annotated[int | None, _size(_MODEL, "The same, over --d-model.")] = None
    d_head: Annotated[int, _size(_MODEL, "Width of a head.")] = 64
    num_heads: Annotated[
        int | None, _size(_MODEL, "Query heads; by default --d-model / --d-head.")
    ] = None
    total_attn_width_ratio: Annotated[
        float | None, _rate(_MODEL, "RATIO", "Width of all heads together over --d-model.")
    ] = None
    num_experts: Annotated[
        int, _size(_MODEL, "Experts of a layer, attention included; a token passes one.")
    ] = 1
    use_glu: Annotated[
        bool, _flag(_MODEL, "--use-glu", "Gated feed-forward network: three matrices, not two.")
    ] = False
    no_multi_query_attn: Annotated[
        bool, _flag(_MODEL, "--no-multi-query-attn", "As many key and value heads as query heads.")
    ] = False
    consecutive_attn_and_ffn: Annotated[
        bool,
        _flag(
            _MODEL,
            "--consecutive-attn-and-ffn",
            "The feed-forward network takes what attention gives, instead of the same input.",
        ),
    ] = False
    batch_size: Annotated[int, _size(_RUN, "Sequences of an optimizer step.")] = 2048
    seq_len: Annotated[int, _size(_RUN, "Tokens of a sequence.")] = 2048
    p_pipe: Annotated[int, _size(_MESH, "Pipeline stages.")] = 1
    p_exp: Annotated[int, _size(_MESH, "Groups of experts.")] = 1
    p_data: Annotated[int, _size(_MESH, "Replicas; weights in parts, as ZeRO-3.")] = 1
    p_seq: Annotated[int, _size(_MESH, "Slices of a sequence.")] = 1
    p_tensor_ext: Annotated[int, _size(_MESH, "Parts of the width between layers.")] = 1
    p_tensor_int: Annotated[int, _size(_MESH, "Parts of heads and inner width.")] = 1
    cluster_flop_rate: Annotated[
        float | None,
        _rate(
            _COUNT,
            "FLOP/S",
            "What one device of the mesh (a GPU, or a cluster of them) reaches: for rates, days, "
            "money.",
        ),
    ] = None
    gpus_per_cluster: Annotated[
        int, _size(_COUNT, "GPUs of a device of the mesh, for GPU-hours and money.")
    ] = 1
    activation_checkpointing: Annotated[
        bool,
        _flag(_COUNT, "--activation-checkpointing", "Backward does the forward once more."),
    ] = False
    fwd_only: Annotated[
        bool, _flag(_COUNT, "--fwd-only", "Rates and days of the forward alone.")
    ] = False
    net_precision_bytes: Annotated[
        int, typer.Option(min=1, max=64, metavar="N", help="Bytes of a value that travels.",
                          rich_help_panel=_COUNT),
    ] = 2  # fmt: skip
    skip_efficiency_check: Annotated[
        bool,
        _flag(_COUNT, "--skip-efficiency-check", "Count runs that a rule of thumb forbids, too."),
    ] = False

    def decoder(self) -> Decoder:
        """
        Raises:
            CostError: the widths contradict each other.
        """
        given = {
            "num_layers": self.num_layers,
            "d_model": self.d_model,
            "d_ffn": feed_forward_width(self.d_model, self.d_ffn, self.d_ffn_ratio),
            "num_heads": heads_of(
                self.d_model, self.d_head, self.num_heads, self.total_attn_width_ratio
            ),
            "d_head": self.d_head,
            "num_experts": self.num_experts,
            "gated": self.use_glu,
            "multi_query": not self.no_multi_query_attn,
            "attention_first": self.consecutive_attn_and_ffn,
        }
        return made(
            Decoder, given, {"d_ffn": "--d-ffn-ratio times --d-model", "num_heads": "heads"}
        )

    def batches(self) -> Batches:
        """
        Raises:
            CostError: the tokens of the run are no number.
        """
        given = {
            "batch_size": self.batch_size,
            "seq_len": self.seq_len,
            "dataset_tokens": self.dataset_size,
        }
        return made(Batches, given, {"dataset_tokens": "--dataset-size"})

    def mesh(self) -> Mesh:
        """
        Raises:
            CostError: an axis has more devices than can be.
        """
        given = {axis.value: getattr(self, f"p_{axis.value}") for axis in Axis}
        return made(Mesh, given, {axis.value: axis.flag for axis in Axis})

    def counting(self) -> Counting:
        """
        Raises:
            CostError: the flop rate is none.
        """
        given = {
            "recompute": self.activation_checkpointing,
            "forward_only": self.fwd_only,
            "bytes_per_value": self.net_precision_bytes,
            "device_flop_per_s": self.cluster_flop_rate,
            "gpus_per_device": self.gpus_per_cluster,
            "checks": not self.skip_efficiency_check,
        }
        return made(Counting, given, {"device_flop_per_s": "--cluster-flop-rate"})

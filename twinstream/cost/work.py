"""What a run must compute and move, whatever the machine, and its time at a given rate."""

from typing import Annotated, Any

from twinstream.cost.bill import Bill, CostError, Prices, bill_of
from twinstream.cost.mesh_work import (
    Batches,
    BatchWork,
    Decoder,
    PassWork,
    WorkAxis,
    WorkMesh,
    parts_of,
)
from twinstream.models.flops import model_flops_per_sequence
from twinstream.models.presets import load_model
from twinstream.models.spec import ModelSpec
from twinstream.schedule.node import Node, flags_of, from_options, option, quantity, size

_MOST_TOKENS_PER_EXPERT = 4096 * 2048
_LEAST_MICRO_BATCHES_PER_STAGE = 4
_LEAST_MATMUL_SIZE = 1024


class ModelOptions(Node, title="Model"):
    """A model by its name; the other fields of a class of this are sizes, where 0 is not given."""

    model: Annotated[
        str | None,
        option("A preset or a config.json, in place of the sizes below.", unit="NAME|FILE"),
    ] = None

    def named(self, seq_len: int, *needed: str) -> ModelSpec | None:
        """The model of the name; None where sizes are given.

        Args:
            needed: sizes without which there is no model.

        Raises:
            CostError: both or neither is given, or the model has experts, which here are layers.
            TwinstreamError: there is none of the name, or it is not supported.
        """
        flags = {name: flags_of(type(self), name)[0] for name in type(self).model_fields}
        if self.model is None:
            if not all(getattr(self, name) for name in needed):
                sizes = " and ".join(flags[name] for name in needed)
                raise CostError(f"say which model: --model NAME, or {sizes}")
            return None
        given = [f for name, f in flags.items() if name in self.model_fields_set - {"model"}]
        if given:
            raise CostError(f"--model {self.model} has its own sizes: leave out {', '.join(given)}")
        spec = load_model(self.model, longest=seq_len)
        if spec.experts is not None:
            raise CostError(
                f"the {spec.experts.count} experts of {spec.name} share attention, and here an "
                "expert is a whole layer: twinstream plan --cluster knows them"
            )
        return spec


class DecoderOptions(ModelOptions, title="Model"):
    """The options that say which decoder is counted."""

    num_layers: Annotated[int, size("Layers.")] = 0
    d_model: Annotated[int, size("Width between layers.")] = 0
    d_ffn: Annotated[
        int | None, size("Inner width of the feed-forward network; by default 4 times --d-model.")
    ] = None
    d_ffn_ratio: Annotated[int | None, size("The same, over --d-model.")] = None
    d_head: Annotated[int, size("Width of a head.")] = 64
    num_heads: Annotated[int | None, size("Query heads; by default --d-model / --d-head.")] = None
    total_attn_width_ratio: Annotated[
        float | None, quantity("Width of all heads together over --d-model.", "RATIO")
    ] = None
    num_experts: Annotated[int, size("Experts, attention included; a token passes one.")] = 1
    use_glu: Annotated[bool, option("Gated feed-forward: three matrices, not two.")] = False
    no_multi_query_attn: Annotated[bool, option("As many key heads as query heads.")] = False
    consecutive_attn_and_ffn: Annotated[
        bool,
        option("The feed-forward network takes what attention gives, as with --model, instead of "
               "the same input."),
    ] = False  # fmt: skip

    def decoder(self, seq_len: int) -> Decoder:
        """
        Raises:
            CostError: the widths contradict each other.
        """
        if (named := self.named(seq_len, "num_layers", "d_model")) is not None:
            return Decoder(spec=named, attention_first=True)
        heads = self._num_heads()
        if self.d_ffn is not None and self.d_ffn_ratio is not None:
            raise CostError(
                f"--d-ffn {self.d_ffn:,} and --d-ffn-ratio {self.d_ffn_ratio:,} both say how wide "
                "the feed-forward network is: give one"
            )
        sizes = {
            "name": "by its sizes",
            "num_layers": self.num_layers,
            "d_model": self.d_model,
            "num_heads": heads,
            "num_kv_heads": heads if self.no_multi_query_attn else 1,
            "head_dim": self.d_head,
            "d_ff": self.d_ffn or (self.d_ffn_ratio or 4) * self.d_model,
            "mlp": "swiglu" if self.use_glu else "gelu",
            **{"vocab_size": 1, "positions": "learned", "max_positions": 1},  # count nothing
        }
        called = {"d_ff": "--d-ffn, or its ratio times --d-model,", "head_dim": "--d-head"}
        return Decoder(
            spec=from_options(ModelSpec, sizes, called),
            num_experts=self.num_experts,
            attention_first=self.consecutive_attn_and_ffn,
        )

    def _num_heads(self) -> int:
        """As given, or those that are together as wide as d_model, or a ratio of it."""
        ratio, d_model, d_head = self.total_attn_width_ratio, self.d_model, self.d_head
        if self.num_heads is not None and ratio is not None:
            raise CostError(
                f"--num-heads {self.num_heads:,} and --total-attn-width-ratio {ratio:g} both say "
                "how wide attention is: give one"
            )
        if self.num_heads is not None:
            return self.num_heads
        if ratio is None:
            return parts_of(d_model, d_head, what="channels of --d-model", by="--d-head")
        width = d_model * ratio
        if width % d_head or not width >= d_head:
            raise CostError(
                f"attention would be {width:g} channels wide, which is no whole number of heads of "
                f"{d_head:,}: change --total-attn-width-ratio or --d-head, or give --num-heads"
            )
        return int(width // d_head)


class Counting(Node, title="How it is counted", populate_by_name=True):
    """How a run is counted and timed."""

    device_flop_per_s: Annotated[
        float | None,
        quantity("What one device of the mesh (a GPU, or a cluster of them) reaches: for rates, "
                 "days, money.", "FLOP/S", "cluster_flop_rate", gt=0),
    ] = None  # fmt: skip
    gpus_per_device: Annotated[
        int, size("GPUs of a device of the mesh, for GPU-hours and money.", "gpus_per_cluster")
    ] = 1
    recompute: Annotated[
        bool, option("Backward does the forward once more.", "activation_checkpointing")
    ] = False
    forward_only: Annotated[bool, option("Rates and days of the forward.", "fwd_only")] = False
    bytes_per_value: Annotated[
        int, option("Bytes of a value that travels.", "net_precision_bytes", gt=0, le=64)
    ] = 2
    checks: Annotated[
        bool, option("Count runs that a rule of thumb forbids, too.", "skip_efficiency_check")
    ] = True


def limits_of(
    decoder: Decoder, batches: Batches, mesh: WorkMesh
) -> tuple[list[dict[str, Any]], tuple[int, ...]]:
    """Rules of thumb for a run whose sizes come apart evenly on its mesh, in the order of asking.

    They keep gradient noise and the pipeline's bubble small, and matmuls large.

    Returns:
        What each keeps in bounds, a value of something, its bound, and what to change where it
        does not hold; and sequences of a micro-batch over all replicas that they leave, ascending.

    Source: the bounds are those of davidsj/ml_par_sim, transformer.py.
    """
    spec, batch, tokens = decoder.spec, batches.batch_size, batches.seq_len // decoder.num_experts
    smallest = mesh.data * -(-_LEAST_MATMUL_SIZE * mesh.seq // tokens)
    least_of_pipe = _LEAST_MICRO_BATCHES_PER_STAGE * mesh.pipe if mesh.pipe > 1 else 1
    largest, of_a_replica = batch // least_of_pipe, batch // mesh.data
    possible = (mesh.data * divisor for divisor in _divisors(of_a_replica))
    sizes = tuple(one for one in possible if smallest <= one <= largest)
    tensor_int, tensor_ext = WorkAxis.TENSOR_INTERNAL, WorkAxis.TENSOR_EXTERNAL
    found = [
        ("gradient noise", "tokens of a batch at an expert", batch * tokens, "at most",
         _MOST_TOKENS_PER_EXPERT, "lower --batch-size"),
        ("pipeline bubble", "micro-batches that a replica has at most", of_a_replica, "at least",
         least_of_pipe, "raise --batch-size, or lower --p-pipe or --p-data"),
        ("arithmetic intensity",
         f"sequences of the least micro-batch whose matmuls have {_LEAST_MATMUL_SIZE:,} tokens",
         smallest, "at most", largest,
         "raise --batch-size, or lower --p-data, --p-seq or --p-pipe"),
        ("arithmetic intensity",
         f"sizes from {smallest:,} to {largest:,} that divide a batch of {batch:,} and are a "
         f"multiple of --p-data {mesh.data:,}", len(sizes), "at least", 1,
         "choose a --batch-size with more divisors"),
        *(("arithmetic intensity", f"{axis.flag} over the {width:,} channels of {of}",
           mesh.degree(axis), "at most", width // _LEAST_MATMUL_SIZE,
           f"lower {axis.flag}, so that each device has {_LEAST_MATMUL_SIZE:,} of them")
          for axis, of, width in (
              (tensor_int, "the feed-forward network", spec.d_ff),
              (tensor_int, "the heads", spec.d_q),
              (tensor_ext, "--d-model", spec.d_model))),
    ]  # fmt: skip
    names = ("kind", "of", "value", "relation", "bound", "advice")
    rules: list[dict[str, Any]] = [dict(zip(names, one, strict=True)) for one in found]
    for rule in rules:
        over = rule["value"] - rule["bound"]
        rule["holds"] = over <= 0 if rule["relation"] == "at most" else over >= 0
    return [one for one in rules if mesh.pipe > 1 or one["kind"] != "pipeline bubble"], sizes


def _divisors(number: int) -> list[int]:
    """
    >>> _divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    low = [one for one in range(1, int(number**0.5) + 1) if number % one == 0]
    return sorted({*low, *(number // one for one in low)})


def work_document(
    decoder: Decoder, batches: Batches, mesh: WorkMesh, counting: Counting, prices: Prices
) -> dict[str, Any]:
    """Count a run: all figures in full, under the names of davidsj/ml_par_sim, too.

    Its Tx and Rx count values, not bytes, and net is both together. Counts are of both passes even
    where only the forward is timed; backward has recompute if that is on. Times are FLOPs by the
    rate of all devices: communication is taken to overlap. None is not asked for.

    Raises:
        CostError: the sizes do not fit together, or a rule of thumb forbids it.
    """
    batch = BatchWork(decoder, batches, mesh)
    limits, sizes = limits_of(decoder, batches, mesh)
    broken = [one for one in limits if not one["holds"]]
    if counting.checks and broken:
        raise CostError(
            "{kind}: {of} would be {value:,}, and should be {relation} {bound:,}: {advice}, or "
            "count it all the same with --skip-efficiency-check".format(**broken[0])
        )
    num_batches, num_devices = batches.num_batches, mesh.num_devices
    if num_batches == 0:
        raise CostError(
            f"--dataset-size {batches.dataset_tokens:g} is no more than half a batch of "
            f"{batches.batch_size * batches.seq_len:,} tokens: raise it, or lower --batch-size"
        )
    forward, backward = PassWork(), PassWork()
    forward.add(batch.forward, num_batches)
    backward.add(batch.backward, num_batches)
    if counting.recompute:
        backward.add(forward)
    both = PassWork()
    both.add(forward)
    both.add(backward)
    passes, per_value = {"fwd": forward, "bwd": backward, "total": both}, counting.bytes_per_value
    figures: dict[str, Any] = {}
    for which, work in passes.items():
        sent, received = sum(work.sent.values()), sum(work.received.values())
        figures |= {f"FLOP_{which}": work.flop, f"flop_{which}": work.flop, f"Tx_{which}": sent,
                    f"Rx_{which}": received, f"net_{which}": sent + received,
                    f"sent_bytes_{which}": sent * per_value,
                    f"received_bytes_{which}": received * per_value}  # fmt: skip
    axes = [
        {"axis": axis.value, "degree": mesh.degree(axis)}
        | {f"{way}_bytes_{which}": getattr(passes[which], way)[axis] * per_value
           for way in ("sent", "received") for which in ("fwd", "bwd")}
        for axis in WorkAxis
    ]  # fmt: skip
    model, spec = None, decoder.spec
    if spec.vocab_size > 1:
        per_sequence = model_flops_per_sequence(spec, batches.seq_len)
        flop = num_batches * batches.batch_size * per_sequence
        model = {"name": spec.name, "num_params": spec.num_parameters, "flop_total": flop}
    return {
        **dict.fromkeys(("N", "params", "num_params"), decoder.num_params),
        **dict.fromkeys(("N_effective", "num_params_per_token"), decoder.num_params_per_token),
        **dict.fromkeys(("D", "num_tokens"), batches.num_tokens),
        **dict.fromkeys(("P", "p", "num_devices"), num_devices),
        **dict.fromkeys(("n_batches", "num_batches"), num_batches),
        "allowed_microbatch_sizes": list(sizes) if counting.checks else None,
        "model": model,
        **figures,
        "axes": axes,
        "limits": limits,
        **_timed(forward if counting.forward_only else both, mesh, counting, prices),
        "asked": {
            "model": decoder.asked,
            "batches": batches.model_dump(),
            "mesh": mesh.model_dump(),
            "counting": counting.model_dump(),
        },
    }  # fmt: skip


def _timed(timed: PassWork, mesh: WorkMesh, counting: Counting, prices: Prices) -> dict[str, Any]:
    """What a device and all of them do a second, in the time that the flop rate gives; the bill."""
    each, num_devices = counting.device_flop_per_s, mesh.num_devices
    if each is None:
        if prices != Prices():
            raise CostError("goodput and money are of time, which needs --cluster-flop-rate")
        names = ("cluster_flop_per_sec", "cluster_bytes_per_sec", "total_flop_per_sec",
                 "total_bytes_per_sec", "runtime_sec", "rates", *Bill.model_fields)  # fmt: skip
        return dict.fromkeys(names)
    per_flop = counting.bytes_per_value / timed.flop
    sent, received = (sum(one.values()) * per_flop * each for one in (timed.sent, timed.received))
    rates = {"flop_per_s": each, "sent_bytes_per_s": sent, "received_bytes_per_s": received}
    totals = {f"total_{name}": rate * num_devices for name, rate in rates.items()}
    run_s = timed.flop / each / num_devices
    return {
        "cluster_flop_per_sec": each,
        "cluster_bytes_per_sec": [sent + received, sent, received],
        "total_flop_per_sec": each * num_devices,
        "total_bytes_per_sec": [num_devices * one for one in (sent + received, sent, received)],
        "runtime_sec": run_s,
        "rates": {**rates, **totals, "run_s": run_s},
        **bill_of(run_s, num_devices * counting.gpus_per_device, prices).model_dump(),
    }

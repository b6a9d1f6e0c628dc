"""The query that options ask: of one device, of ranks that run here, or of a cluster's GPUs.

The command line has its options from flags, sweeps from TOML, Python and the explorer from values
by the same names: all of them ask here, so that what is meant, and what is refused, is decided
once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import nan
from typing import Any, TypeVar, get_args

from twinstream.clusters.kernel_sets import split_refusal
from twinstream.clusters.shared_machine import cores_here, place_here
from twinstream.hardware_profiles.clusters.loader import machine_of
from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.kernel_costs.attention_limits import attention_names
from twinstream.models.layouts.layout import LayoutError, Recompute
from twinstream.models.loss import has_function, kind_of_loss
from twinstream.models.presets import model_notes
from twinstream.models.providers.model import AnyModel, require_decoder, with_aux_loss
from twinstream.models.recipes.recipe import (
    MATMULS_OF_PRECISION,
    KernelChoice,
    KernelSet,
    narrow_units,
)
from twinstream.options.option_group import OptionGroup, flag_of
from twinstream.options.plan_options import KEPT, ClusterOptions, PlanOptions
from twinstream.options.step_options import RankOptions
from twinstream.planner.choices import (
    KINDS,
    RECOMPUTE_LEVELS,
    ChoiceError,
    Choices,
    recompute_level,
    recompute_word,
    require_known,
)
from twinstream.planner.kernel_choice import kernels_named
from twinstream.planner.policies import ON_DEVICE, optimizer_places
from twinstream.planner.request import (
    PlanRequest,
    TrainingStep,
    caps_of,
    with_drive,
    with_endurance,
)
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.node import from_options
from twinstream.schedule.sizes import SizeError, parse_number
from twinstream.schedule.workload import Packing
from twinstream.study.answer import StudyError
from twinstream.study.layouts import LayoutQuery
from twinstream.study.one_device import DeviceQuery
from twinstream.study.query import Loader, Query
from twinstream.study.values import (
    LAYOUT_NAMES,
    OPEN,
    Kind,
    Values,
    fault_of,
    is_price,
    kind_of,
    missing_of,
    numbers_among,
    written_options,
)
from twinstream.tracing import path_notes

_Group = TypeVar("_Group", bound=OptionGroup)
_LONGEST_SIZE = 40
_MOST_LENGTHS = 4096
_TOO_LONG = 10**9
_NOT_OF_RANKS = ("--policy", "--prefetch", "--effort", "--optimizer-overhead")
_NOT_OF_CLUSTERS = (
    "--policy", "--home", "--prefetch", "--effort", "--optimizer-overhead", "--chunks-per-round",
    "--optimizer",
)  # fmt: skip
# Of several GPUs, and what each of them may be of a single one.
_OF_SEVERAL = {
    **dict.fromkeys(("tp", "cp", "pp", "dp", "ep", "shard", "virtual_stages"), 1),
    "pipeline": None, "reduction": None, "zero": 0, "keep": None, "parts": None, "cp_parts": None,
    "sequence_parallel": None, "cp_exchange": None,
    "etp": 1, "expert_imbalance": 1.0, "tp_overlap": False, "capacity_factor": None,
    "expert_nodes": 1,
    "precision_units": None,
}  # fmt: skip
_OF_CLUSTERS_ALONE = (
    "tp", "cp", "ep", "etp", "expert_imbalance", "expert_nodes", "capacity_factor", "tp_overlap",
    "shard", "offload",
)  # fmt: skip


class ShareError(TwinstreamError):
    """A share that cannot be read."""


class LengthsError(TwinstreamError):
    """Lengths of sequences that cannot be read."""


def query_of(values: Values, load: Loader | None = None) -> Query:
    """The query of values by name; a price is no part of it.

    >>> query_of({"model": "tiny", "machine": "cpu", "seq_len": 64}).subject.title
    'tiny on cpu, policy optimal'

    Raises:
        TwinstreamError: a name or a value is wrong, or one is missing.
    """
    load, values = load or Loader(), {n: v for n, v in values.items() if not is_price(n)}
    kind = kind_of(values)
    for name, value in values.items():
        if (fault := fault_of(kind, name, value)) is not None:
            raise StudyError(f"{name} {fault}")
    if missing := missing_of(values):
        raise StudyError(missing)
    options = written_options({n: v for n, v in values.items() if v != OPEN})
    if "policy" in options:
        options["policy"] = load.policy(options["policy"])
    if kind != "cluster" and options.get("recompute") == "auto":
        del options["recompute"]  # as it is where it is open
    wanted, asked = _group(PlanOptions, options), _group(ClusterOptions, options)
    load = load.with_numbers(numbers_among(values))
    found = asked_by(wanted, asked, values.get("ranks"), load, kind)  # type: ignore[arg-type]
    if isinstance(found, LayoutQuery):  # what a layout has beside its options
        more = {n: v for n, v in options.items() if n in LAYOUT_NAMES and n not in found.fixed}
        more = {n: v for n, v in more.items() if n not in ClusterOptions.model_fields}
        return replace(found, fixed={**found.fixed, **more}) if more else found
    return found


def _group(kind: type[_Group], options: Mapping[str, Any]) -> _Group:
    """The options of a group, which errors call by their names."""
    own = {name: value for name, value in options.items() if name in kind.model_fields}
    return from_options(kind, own, {name: name for name in own})


def device_query(values: Values, load: Loader) -> DeviceQuery:
    """The query of values by name of which one is a machine."""
    found = query_of(values, load)
    assert isinstance(found, DeviceQuery), "it is of a machine"
    return found


def asked_by(
    wanted: PlanOptions,
    asked: ClusterOptions = ClusterOptions(),  # noqa: B008 - frozen
    num_ranks: int | None = None,
    load: Loader | None = None,
    kind: Kind | None = None,
) -> Query:
    """The query that options ask.

    Args:
        num_ranks: where ranks are asked for by name.
        kind: of the query; None: as the options say.

    Raises:
        TwinstreamError: an option is missing, unknown, cannot be read, or is of another query.
    """
    assert wanted.model is not None and wanted.seq_len is not None
    load, lengths = load or Loader(), lengths_of(wanted.seq_len)
    wanted, choices = _in_tokens(wanted, asked, lengths), _choices(wanted, asked)
    optimizer, overhead = _optimizer(wanted), _overhead(wanted)
    spec = load.model(
        wanted.model, max(lengths), wanted.lora, wanted.loss, wanted.dtype,
        trusted=wanted.trust_remote_code, priced=asked.cluster is not None,
    )  # fmt: skip
    kind = kind or _kind(wanted, asked, num_ranks, spec)
    _require_of(kind, wanted, asked, num_ranks)
    fixed, num_gpus = _fixed(wanted, asked, kind, lengths), num_ranks or asked.gpus or 1
    cluster = None if asked.cluster is None else load.cluster(asked.cluster)
    if cluster is not None:
        cluster.require_gpus(num_gpus)
    machine = _machine(wanted, cluster, load)
    if kind == "cluster" and cluster is None:
        cluster = around(machine, num_gpus, wanted)
    on_host = num_gpus if cluster is None else min(cluster.count("gpus_per_node"), num_gpus)
    packing = Packing.of(lengths) if len(set(lengths)) > 1 else None
    is_packed = kind_of_loss(wanted.loss).sides > 1
    packed = False if kind == "cluster" else lengths if packing else is_packed
    priced = _priced(wanted, asked, require_decoder(spec)) if kind == "cluster" else None
    is_open = kind == "cluster" and wanted.kernels == "auto" and wanted.attention is None
    kernels = priced or kernels_named(
        machine, spec, None if is_open else wanted.kernels, wanted.attention,
        nondeterministic=wanted.nondeterministic, packed=packed,
    )  # fmt: skip
    recipe = wanted.recipe(spec, kernels=kernels, clips=wanted.clips, optimizer=optimizer)
    chunk_tokens = None if kind == "cluster" else wanted.chunk_tokens
    step = TrainingStep(
        max(lengths), wanted.tokens_per_step, chunk_tokens, wanted.chunks_per_round, recipe,
        overhead, packing,
    )  # fmt: skip
    if wanted.disk_mem is not None and kind == "cluster":
        raise TwinstreamError(
            "--disk-mem: a cluster's layouts have no disk; plan --ranks N, or leave it out"
        )
    if wanted.disk_bandwidth is not None:
        machine = with_drive(machine, wanted.disk_bandwidth)
    machine = with_endurance(machine, wanted.disk_tbw)
    request = PlanRequest(
        with_aux_loss(spec, wanted.aux_loss), step, machine,
        caps_of(
            machine, wanted.device_mem, wanted.host_mem, on_host, disk_mem=wanted.disk_mem
        ),
        wanted.policy, choices,
    ).allowed(runs=kind != "cluster")  # fmt: skip
    if kind == "device":
        return DeviceQuery(request)
    return LayoutQuery(
        request, num_gpus, cluster, fixed, runs_here=kind == "ranks",
        any_kernels=wanted.kernels in (None, "auto"), keep=asked.keep or KEPT,
    )  # fmt: skip


def notes_of(wanted: PlanOptions) -> list[str]:
    """Return notes about the model's file, and about what computes it."""
    if wanted.model is None:
        return []
    notes = model_notes(wanted.model, wanted.dtype)
    if has_function(wanted.loss) or wanted.trust_remote_code:
        return notes
    longest = None if wanted.seq_len is None else max(lengths_of(wanted.seq_len))
    return notes + path_notes(wanted.model, wanted.dtype, longest, wanted.lora)


def _kind(
    wanted: PlanOptions, asked: ClusterOptions, num_ranks: int | None, spec: AnyModel
) -> Kind:
    """Tell whether a query is of one device, by kernels of its own; of several of a machine, by
    kernels that run here; or of a cluster's GPUs."""
    if num_ranks is not None:
        return "ranks"
    is_priced = wanted.kernels == "megatron" or _matmuls(asked) != "model"
    runs = asked.cluster is None or (asked.gpus == 1 and spec.executor_refusal is None)
    if asked.gpus in (None, 1) and not is_priced and runs:
        return "device"
    is_split = not _runs_split(wanted, asked, spec)
    several = asked.cluster is None and (asked.gpus or 1) > 1
    return "ranks" if several and not is_split and not is_priced else "cluster"


def _runs_split(wanted: PlanOptions, asked: ClusterOptions, spec: AnyModel) -> bool:
    """Whether kernels here compute the parts of blocks and of sequences, or share the experts, that
    are asked for, if any."""
    recipe = wanted.recipe(spec, kernels=None, clips=wanted.clips, optimizer=_optimizer(wanted))
    return split_refusal(spec, recipe, asked.split) is None


def _matmuls(asked: ClusterOptions) -> str:
    return MATMULS_OF_PRECISION[asked.precision or "bf16"]


def _require_of(
    kind: Kind, wanted: PlanOptions, asked: ClusterOptions, num_ranks: int | None
) -> None:
    """Refuse what is of another kind of query.

    Raises:
        LayoutError: names the flags, and says what to do.
    """
    if kind != "device" and wanted.update_places != "recipe":
        raise LayoutError(
            f"--optimizer {wanted.optimizer}: updates on the host are planned for one device yet: "
            "leave it out, or plan for one"
        )
    if kind == "device":
        beside = [
            flag_of(name)
            for name, alone in _OF_SEVERAL.items()
            if getattr(asked, name) not in (None, alone)
        ]
        told = "is of several GPUs: add --gpus N"
    elif kind == "ranks":
        if asked.gpus not in (None, num_ranks or asked.gpus):
            raise LayoutError(
                f"--ranks {num_ranks} and --gpus {asked.gpus} both count: leave out one"
            )
        beside = [flag for flag in asked.given() if flag not in _of_ranks(asked)]
        beside = beside or [flag for flag in wanted.given() if flag in _NOT_OF_RANKS]
        told = "is not of ranks that run: leave it out"
        asked.require_run()
    else:
        for flag in ("--parts", "--cp-parts", "--cp-exchange"):
            if getattr(asked, flag.strip("-").replace("-", "_")) is not None:
                raise LayoutError(
                    f"{flag} is of ranks that run: plan with --ranks N, or leave it out"
                )
        beside = [flag for flag in wanted.given() if flag in _NOT_OF_CLUSTERS]
        beside = beside and [f"layouts are not searched by {', '.join(beside)}"]
        told = "leave it out, or plan for --gpus 1 (and --home, --chunks-per-round of --ranks)"
    if beside:
        raise LayoutError(f"{', '.join(beside)}{':' if kind == 'cluster' else ''} {told}")
    if wanted.machine is not None and asked.cluster is not None and num_ranks is None:
        raise LayoutError("--machine and --cluster both say where to train: leave out one")
    if wanted.machine is None and asked.cluster is None:
        raise LayoutError(
            "this needs --machine (one device), or --cluster with --gpus"
            if num_ranks is None
            else "--ranks needs --machine (of one rank), or --cluster with its nodes"
        )


def _of_ranks(asked: ClusterOptions) -> set[str]:
    """Flags that ranks have, or that say what is so of them."""
    ours = {flag_of(name) for name in RankOptions.model_fields}
    ours |= {"--cluster", "--gpus", "--global-batch", "--micro-batch", "--no-offload"}
    if asked.precision == "bf16":
        ours.add("--precision")
    return ours


def _machine(wanted: PlanOptions, cluster: Cluster | None, load: Loader) -> Machine:
    """That of one device: the one named, else a node's."""
    if wanted.machine is not None:
        return load.machine(wanted.machine)
    assert cluster is not None, "one of them is given"
    return machine_of(cluster)


def around(machine: Machine, num_gpus: int, wanted: PlanOptions) -> Cluster:
    """Return the machine as one with so many devices."""
    found = place_here(machine, num_gpus, cores_here()).cluster
    return found.model_copy(update={"machine": wanted.machine})


def _in_tokens(wanted: PlanOptions, asked: ClusterOptions, lengths: Sequence[int]) -> PlanOptions:
    """The options with tokens where sequences are given."""
    for size in (wanted.device_mem, wanted.host_mem):
        if size is not None and len(size) > _LONGEST_SIZE:
            raise SizeError(
                f"'{size[:_LONGEST_SIZE]}...' is no size; write it as 24GiB, 80% or bytes"
            )
    tokens = _once("--global-batch", asked.global_batch, wanted.tokens_per_step, lengths)
    chunk = _once("--micro-batch", asked.micro_batch, wanted.chunk_tokens, lengths)
    return wanted.model_copy(update={"tokens_per_step": tokens, "chunk_tokens": chunk})


def _overhead(wanted: PlanOptions) -> float:
    """The share of the step that the optimizer may take."""
    if wanted.optimizer_overhead is None:
        return 0.01
    if wanted.tokens_per_step is not None:
        raise ShareError(
            "--optimizer-overhead proposes tokens per step where none are given; leave out "
            "either it or --tokens-per-step"
        )
    return share_of(wanted.optimizer_overhead)


def _once(
    flag: str, sequences: int | None, tokens: int | None, lengths: Sequence[int]
) -> int | None:
    """Tokens that are given as such, or as a number of sequences by a flag."""
    if sequences is None:
        return tokens
    counted = sequences * _one_length(lengths)
    if tokens is not None and tokens != counted:
        raise LayoutError(
            f"{flag} {sequences} are {counted:,} tokens, and {tokens:,} are given: leave out one"
        )
    return counted


def _one_length(lengths: Sequence[int]) -> int:
    if len(set(lengths)) > 1:
        raise LayoutError(
            f"--seq-len '{','.join(map(str, lengths))}' is several lengths: in layouts of several "
            "GPUs, and in counts of sequences, all sequences are as long"
        )
    return lengths[0]


def _optimizer(wanted: PlanOptions) -> str:
    """Return where updates are made."""
    places = optimizer_places(wanted.policy)
    if wanted.update_places != "recipe":
        return ON_DEVICE[0]
    if wanted.optimizer is not None and wanted.optimizer not in places:
        raise ChoiceError(
            f"policy '{wanted.policy}' has the optimizer '{places[0]}', not {wanted.optimizer}: "
            "leave out --optimizer"
        )
    return wanted.optimizer or ON_DEVICE[0]


def _choices(wanted: PlanOptions, asked: ClusterOptions) -> Choices:
    """Return what is fixed of plans; homes where nothing may be offloaded are on the device."""
    homes: dict[str, Any] = dict.fromkeys(KINDS, "device") if asked.offload is False else {}
    for text in wanted.home:
        kind, found, where = text.partition("=")
        if not found or kind in homes:
            wrong = "twice" if found else "without a place"
            raise ChoiceError(
                f"--home '{text}' names '{kind}' {wrong}; write each kind once, as parameter=host"
            )
        homes[kind] = where
    level = None if wanted.recompute is None else recompute_level(wanted.recompute)
    return Choices(homes, level, wanted.prefetch, wanted.effort, wanted.update_places)


def _fixed(
    wanted: PlanOptions, asked: ClusterOptions, kind: Kind, lengths: Sequence[int]
) -> dict[str, Any]:
    """Fields of the layout that are given."""
    if kind == "device":
        return {}
    found = asked.layout_fields()
    if wanted.recompute is not None:
        found["recompute"] = recompute_word(wanted.recompute)
        levels = get_args(Recompute) if kind == "cluster" else (*RECOMPUTE_LEVELS,)
        require_known("--recompute", found["recompute"], levels)
    if kind != "cluster":
        return found
    _require_sequences(wanted, _one_length(lengths))
    others = {name: getattr(asked, name) for name in _OF_CLUSTERS_ALONE}
    if wanted.chunk_tokens is not None:
        others["micro_batch"] = wanted.chunk_tokens // lengths[0]
    return found | {name: value for name, value in others.items() if value is not None}


def _require_sequences(wanted: PlanOptions, seq_len: int) -> None:
    """
    Raises:
        LayoutError: tokens are missing, or are no whole sequences.
    """
    if wanted.tokens_per_step is None:
        raise LayoutError(
            "a layout of several GPUs needs --tokens-per-step, or --global-batch in sequences"
        )
    chunks = "layouts are searched with whole sequences in a microbatch; --ranks plans slices"
    for flag, tokens, why in (
        ("--tokens-per-step", wanted.tokens_per_step, "a step is whole sequences"),
        ("--chunk-tokens", wanted.chunk_tokens, chunks),
    ):
        if tokens is not None and (tokens % seq_len or not tokens):
            raise LayoutError(f"{flag} {tokens:,} are no multiple of --seq-len {seq_len:,}: {why}")


def _priced(wanted: PlanOptions, asked: ClusterOptions, spec: ModelSpec) -> KernelChoice | None:
    """Megatron's kernels where they are named, or nothing else computes what is; None where
    twinstream's own may be named, or kernels are open."""
    matmuls, named = MATMULS_OF_PRECISION[asked.precision or "bf16"], wanted.kernels
    require_known("--kernels", named, ("auto", *get_args(KernelSet)))
    why, is_narrow = spec.executor_refusal, matmuls != "model"
    if is_narrow and named not in (None, "auto", "megatron"):
        raise LayoutError(
            f"--precision {asked.precision} is of the kernel set megatron, not of {named}: leave "
            "out --kernels"
        )
    if why is not None and named in ("eager", "triton"):
        raise LayoutError(
            f"the kernel set {named} does not compute {spec.name}: {why}; leave out --kernels, or "
            "price Megatron's with --kernels megatron"
        )
    if asked.precision_units is not None and not is_narrow:
        raise LayoutError("--precision-units says what computes in --precision fp8 or fp4: add it")
    if named != "megatron" and not is_narrow and (why is None or wanted.attention is None):
        return None
    known = (*attention_names(), "flash", "unfused")
    require_known("--attention", wanted.attention, known)
    return KernelChoice(
        vector="megatron", attention=wanted.attention or "flash", matmuls=matmuls,
        deterministic=False, narrow=narrow_units(asked.precision_units),
    )  # fmt: skip


def share_of(text: str) -> float:
    """
    >>> share_of("1%"), share_of("0.01")
    (0.01, 0.01)
    """
    try:
        number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        number = nan
    if not 0.0 < number < 1.0:
        raise ShareError(
            f"--optimizer-overhead '{text}' is no share between 0 and 1; write it as 1% or 0.01"
        )
    return number


def lengths_of(text: str) -> tuple[int, ...]:
    """
    >>> lengths_of("8k"), lengths_of("300,212,512")
    ((8192,), (300, 212, 512))
    """
    numbers = [parse_number(part) for part in text.split(",", _MOST_LENGTHS)]
    lengths = [one for one in numbers if isinstance(one, int) and 0 < one < _TOO_LONG]
    if len(numbers) > _MOST_LENGTHS or len(lengths) < len(numbers):
        raise LengthsError(
            f"--seq-len '{text[:_LONGEST_SIZE]}' is no length of sequences: give tokens from 1 to "
            f"999999999, or the lengths of up to {_MOST_LENGTHS} packed sequences as 300,212,512"
        )
    return tuple(lengths)

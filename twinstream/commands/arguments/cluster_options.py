"""The options of the command line that lay a model out on a cluster."""

from typing import Any, get_args

from twinstream.clusters.search.question import KEPT, LayoutSearch, given_caps
from twinstream.clusters.shared_machine import cores_here, place_here
from twinstream.commands.arguments.plan_options import PlanOptions
from twinstream.commands.arguments.requests import lengths_of, recipe_of, require_known, spec_of
from twinstream.hardware_profiles.clusters.loader import load_cluster, machine_of
from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.hardware_profiles.loader import load_machine
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.kernel_costs.attention_limits import attention_names
from twinstream.models.model import require_decoder
from twinstream.models.parallel.job import Job
from twinstream.models.parallel.layout import Layout, LayoutError, Recompute
from twinstream.models.recipe import MATMULS_OF_PRECISION, KernelChoice, KernelSet
from twinstream.models.spec import ModelSpec
from twinstream.options.option_group import SEVERAL, STEPS, WHERE, flag
from twinstream.options.step_options import RankOptions
from twinstream.planner.choices import KINDS, recompute_word
from twinstream.planner.kernel_choice import kernels_named
from twinstream.planner.request import DEFAULT_POLICY


def _degree(what: str, *, rare: bool = False) -> Any:
    return flag(SEVERAL, "N", what, rare=rare, ge=1)


class ClusterOptions(RankOptions):
    """What to lay out on how many GPUs, and what is not left open; None where one is not given."""

    cluster: str | None = flag(
        WHERE, "NAME|FILE",
        "GPUs of this cluster (`twinstream clusters`), or a TOML file; instead of --machine.",
    )  # fmt: skip
    gpus: int | None = flag(
        WHERE, "N",
        "GPUs, by default 1. With --cluster all layouts are searched, with --machine those that "
        "run here, unless others are asked for (--tp, --cp, --ep, --kernels megatron).", ge=1,
    )  # fmt: skip
    global_batch: int | None = flag(
        STEPS, "N", "Sequences of a training step: --tokens-per-step in sequences.", ge=1
    )
    precision: str | None = flag(
        SEVERAL, "NAME", "bf16 (the default), fp16, fp8 or fp4, of linear layers; the last two are "
        "of the kernel set megatron.",
    )  # fmt: skip
    offload: bool | None = flag(
        SEVERAL, "", "Whether what has no room on the device may be in host memory; by default of "
        "several GPUs only where nothing fits without.", rare=True,
    )  # fmt: skip
    keep: int | None = flag(
        SEVERAL,
        "N",
        f"How many of the best layouts are shown, by default {KEPT}.",
        ge=1,
        le=20,
        rare=True,
    )
    tp: int | None = _degree("Tensor parallel ranks.")
    cp: int | None = _degree("Context parallel ranks.", rare=True)
    ep: int | None = _degree("Replicas that share the routed experts.", rare=True)
    micro_batch: int | None = _degree(
        "Sequences of a microbatch: --chunk-tokens in sequences.", rare=True
    )

    def given(self) -> list[str]:
        """The flags that are set."""
        found = [flag for flag in super().given() if flag != "--offload"]
        if self.offload is None:
            return found
        return [*found, "--offload" if self.offload else "--no-offload"]

    def is_of_one_device(self, wanted: PlanOptions) -> bool:
        """Whether one device is asked about, by kernels of its own."""
        if self.gpus not in (None, 1) or wanted.kernels == "megatron":
            return False
        if MATMULS_OF_PRECISION.get(self.precision or "bf16", "model") != "model":
            return False
        if self.cluster is None:
            return True
        return self.gpus == 1 and spec_of(wanted).executor_refusal is None

    def is_of_ranks(self, wanted: PlanOptions) -> bool:
        """Whether several devices of a machine are asked about, by kernels that run here."""
        several = self.cluster is None and (self.gpus or 1) > 1
        split = any((getattr(self, axis) or 1) > 1 for axis in ("tp", "cp", "ep"))
        narrow = MATMULS_OF_PRECISION.get(self.precision or "bf16", "model") != "model"
        return several and not split and not narrow and wanted.kernels != "megatron"

    def of_devices(self, wanted: PlanOptions) -> PlanOptions:
        """What is asked of every device: with tokens where sequences are given, and homes where
        nothing may be offloaded."""
        tokens, chunk = self._tokens_per_step(wanted), self._chunk_tokens(wanted)
        homes = wanted.home
        if self.offload is False:
            homes = (*(f"{kind}=device" for kind in KINDS), *homes)
        changes = {"tokens_per_step": tokens, "chunk_tokens": chunk, "home": homes}
        return wanted.model_copy(update=changes)

    def one_device(self, wanted: PlanOptions) -> tuple[PlanOptions, Machine]:
        """What is asked of one device, a node's where a cluster is given.

        Raises:
            LayoutError: an option is of several GPUs, or a number is given twice.
            TwinstreamError: a profile cannot be read.
        """
        require_known("--precision", self.precision, tuple(MATMULS_OF_PRECISION))
        of_one = {"pipeline": None, "reduction": None, "zero": 0, "keep": None}
        several = ("tp", "cp", "pp", "dp", "ep", "virtual_stages", *of_one)
        beside = [
            f"--{name.replace('_', '-')}"
            for name in several
            if getattr(self, name) not in (None, of_one.get(name, 1))
        ]
        if beside:
            raise LayoutError(f"{', '.join(beside)} is of several GPUs: add --gpus N")
        if self.cluster is not None and wanted.machine is not None:
            raise LayoutError("--machine and --cluster both say where to train: leave out one")
        if self.cluster is None and wanted.machine is None:
            raise LayoutError("this needs --machine (one device), or --cluster with --gpus")
        wanted = self.of_devices(wanted)
        if self.cluster is not None:
            return wanted, machine_of(load_cluster(self.cluster))
        assert wanted.machine is not None
        return wanted, load_machine(wanted.machine)

    def question(self, wanted: PlanOptions) -> LayoutSearch:
        """What is searched: the model, its step and recipe on GPUs of a cluster or machine.

        Raises:
            TwinstreamError: an option is missing, unknown, or of one device alone.
        """
        num_gpus = self.gpus or 1
        cluster = self.profile(wanted, num_gpus)
        caps = given_caps(cluster, num_gpus, wanted.device_mem, wanted.host_mem)
        return LayoutSearch(self._job(wanted, cluster), num_gpus, cluster, self.fixed(wanted), caps)

    def profile(self, wanted: PlanOptions, num_gpus: int) -> Cluster:
        """The cluster, or the machine as one of so many devices."""
        if self.cluster is None:
            if wanted.machine is None:
                raise LayoutError("this needs --machine (one device), or --cluster with --gpus")
            place = place_here(load_machine(wanted.machine), num_gpus, cores_here())
            return place.cluster.model_copy(update={"machine": wanted.machine})
        if wanted.machine is not None:
            raise LayoutError("--machine and --cluster both say where to train: leave out one")
        return load_cluster(self.cluster)

    def fixed(self, wanted: PlanOptions) -> dict[str, Any]:
        """Fields of the layout that are not left open.

        Raises:
            LayoutError: there is no such pipeline, or no such recomputation.
        """
        split = {name: getattr(self, name) for name in ("tp", "cp", "ep")}
        found = self.layout_fields() | {name: n for name, n in split.items() if n is not None}
        recompute = None if wanted.recompute is None else recompute_word(wanted.recompute)
        require_known("--recompute", recompute, get_args(Recompute))
        if recompute is not None:
            found["recompute"] = recompute
        if (chunk := self._chunk_tokens(wanted)) is not None:
            found["micro_batch"] = _sequences(
                "--chunk-tokens",
                chunk,
                _seq_len(wanted),
                "layouts are searched with whole sequences in a microbatch; --ranks plans slices",
            )
        if self.offload is not None:
            found["offload"] = self.offload
        return found

    def _job(self, wanted: PlanOptions, cluster: Cluster) -> Job:
        """Model, batch and recipe; the layout is the smallest there is."""
        if beside := [flag for flag in wanted.given() if flag in _OF_ONE_DEVICE]:
            raise LayoutError(
                f"layouts are not searched by {', '.join(beside)}: leave it out, or plan for "
                "--gpus 1 (and --home, --chunks-per-round of --ranks)"
            )
        require_known("--precision", self.precision, tuple(MATMULS_OF_PRECISION))
        seq_len, tokens = _seq_len(wanted), self._tokens_per_step(wanted)
        if tokens is None:
            raise LayoutError(
                "a layout of several GPUs needs --tokens-per-step, or --global-batch in sequences"
            )
        spec = require_decoder(spec_of(wanted))
        return Job(
            shape=spec,
            layout=Layout(),
            seq_len=seq_len,
            global_batch=_sequences(
                "--tokens-per-step", tokens, seq_len, "a step is whole sequences"
            ),
            recipe=recipe_of(wanted, DEFAULT_POLICY, self._kernels(wanted, spec, cluster), spec),
            any_kernels=wanted.kernels in (None, "auto"),
        )

    def _kernels(
        self, wanted: PlanOptions, spec: ModelSpec, cluster: Cluster
    ) -> KernelChoice | None:
        """Those that are named; None leaves them open."""
        matmuls = MATMULS_OF_PRECISION[self.precision or "bf16"]
        require_known("--kernels", wanted.kernels, ("auto", *get_args(KernelSet)))
        if wanted.kernels == "megatron" or (
            matmuls != "model" and wanted.kernels in (None, "auto")
        ):
            known = (*attention_names(), "flash", "unfused")
            require_known("--attention", wanted.attention, known)
            return KernelChoice(
                vector="megatron",
                attention=wanted.attention or "flash",
                matmuls=matmuls,
                deterministic=False,
            )
        if matmuls != "model":
            raise LayoutError(
                f"--precision {self.precision} is of the kernel set megatron, not of "
                f"{wanted.kernels}: leave out --kernels"
            )
        if (why := spec.executor_refusal) is not None:
            if wanted.kernels in ("eager", "triton"):
                raise LayoutError(
                    f"the kernel set {wanted.kernels} does not compute {spec.name}: {why}; leave "
                    "out --kernels, or price Megatron's with --kernels megatron"
                )
            if wanted.attention is None:
                return None
            return self._kernels(wanted.model_copy(update={"kernels": "megatron"}), spec, cluster)
        return kernels_named(
            machine_of(cluster),
            spec,
            wanted.kernels,
            wanted.attention,
            nondeterministic=wanted.nondeterministic,
        )

    def _tokens_per_step(self, wanted: PlanOptions) -> int | None:
        return _once(wanted, "--global-batch", self.global_batch, wanted.tokens_per_step)

    def _chunk_tokens(self, wanted: PlanOptions) -> int | None:
        return _once(wanted, "--micro-batch", self.micro_batch, wanted.chunk_tokens)


def _once(wanted: PlanOptions, flag: str, sequences: int | None, tokens: int | None) -> int | None:
    """Tokens that are given as such, or as a number of sequences by a flag."""
    if sequences is None:
        return tokens
    counted = sequences * _seq_len(wanted)
    if tokens is not None and tokens != counted:
        raise LayoutError(
            f"{flag} {sequences} are {counted:,} tokens, and {tokens:,} are given: leave out one"
        )
    return counted


def _sequences(flag: str, tokens: int, seq_len: int, why: str) -> int:
    count, left = divmod(tokens, seq_len)
    if left or not count:
        raise LayoutError(f"{flag} {tokens:,} are no multiple of --seq-len {seq_len:,}: {why}")
    return count


def _seq_len(wanted: PlanOptions) -> int:
    assert wanted.seq_len is not None
    lengths = lengths_of(wanted.seq_len)
    if len(set(lengths)) > 1:
        raise LayoutError(
            f"--seq-len {wanted.seq_len!r} is several lengths: in layouts of several GPUs, and in "
            "counts of sequences, all sequences are as long"
        )
    return lengths[0]


_OF_ONE_DEVICE = (
    "--policy",
    "--home",
    "--prefetch",
    "--effort",
    "--optimizer-overhead",
    "--chunks-per-round",
    "--optimizer",
)

"""What can be asked of a search of layouts, by name, and a question with other values."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

from pydantic import ValidationError

from twinstream.clusters.search.search import SearchResult, search_layouts
from twinstream.hardware_profiles.clusters.loader import machine_of
from twinstream.hardware_profiles.clusters.schema import CLUSTER_NUMBERS, Cluster
from twinstream.hardware_profiles.clusters.what_if import with_numbers
from twinstream.hardware_profiles.profile_files import nearest
from twinstream.hardware_profiles.schema import NUMBER_FIELDS
from twinstream.models.parallel.job import Job
from twinstream.models.parallel.layout import Layout, LayoutError
from twinstream.models.recipe import MATMULS_OF_PRECISION, KernelChoice, Recipe
from twinstream.planner.request import caps_of
from twinstream.schedule.document import Caps
from twinstream.schedule.sizes import SizeError, parse_bytes
from twinstream.simulator.network_costs import share_of

Value = str | bool | int | float
CLUSTER_NUMBER, MACHINE_NUMBER = "cluster.", "machine."
KEPT = 3  # of the best looking layouts are simulated whole
OPEN = "open"  # of a layout's field: the search chooses
COUNTS = ("gpus", "seq_len", "global_batch")
LAYOUT_NAMES = (
    "tp", "cp", "pp", "dp", "ep", "virtual_stages", "micro_batch", "pipeline", "zero", "recompute",
    "sequence_parallel", "dp_overlap", "shard", "expert_imbalance", "offload",
)  # fmt: skip
RECIPE_NAMES = ("precision", "gradients", "optimizer_state")
NAMES = (*COUNTS, *RECIPE_NAMES, *LAYOUT_NAMES)
_OF_JOB = ("seq_len", "global_batch")
_NOT_CONTENT = ("name", "description", "machine", "machine_changes")


@dataclass(frozen=True)
class LayoutSearch:
    """Which layout of a job is the fastest on so many GPUs; fields in `fixed` are not open."""

    job: Job
    num_gpus: int
    cluster: Cluster
    fixed: Mapping[str, Any]
    caps: Caps | None = None  # of one GPU; None: its share of all that a node has

    def answer(
        self, keep: int = KEPT, progress: Callable[[str], None] = lambda text: None
    ) -> SearchResult:
        """
        Raises:
            NoLayoutError: none is possible, or none fits.
            TwinstreamError: fixed fields contradict the GPUs, or a profile lacks a number.
        """
        return search_layouts(
            self.job,
            self.num_gpus,
            self.cluster,
            self.fixed,
            keep=keep,
            progress=progress,
            caps=self.caps,
        )

    @property
    def content(self) -> dict[str, Any]:
        """All that the answer depends on."""
        machine = machine_of(self.cluster).model_dump(mode="json", exclude=set(_NOT_CONTENT))
        cluster = self.cluster.model_dump(mode="json", exclude=set(_NOT_CONTENT))
        job = self.job.model_dump(mode="json", exclude={"layout"})
        caps = None if self.caps is None else self.caps.model_dump()
        told = {"gpus": self.num_gpus, "fixed": dict(self.fixed), "caps": caps}
        return {**told, "job": job, "cluster": cluster, "machine": machine}

    def changed(self, values: Mapping[str, Value]) -> "LayoutSearch":
        """The question with values of `NAMES`, `cluster.<number>` or `machine.<number>` instead.

        They are checked by `value_fault` before.

        Raises:
            ProfileError: there is no such number of the cluster or its node, or it cannot be.
        """
        numbers = {
            name.removeprefix(CLUSTER_NUMBER): _number(value)
            for name, value in values.items()
            if name.startswith((CLUSTER_NUMBER, MACHINE_NUMBER))
        }
        fixed = {**self.fixed, **{n: values[n] for n in LAYOUT_NAMES if n in values}}
        return replace(
            self,
            job=_with_recipe(self.job, values).model_copy(
                update={n: values[n] for n in _OF_JOB if n in values}
            ),
            num_gpus=int(values.get("gpus", self.num_gpus)),
            cluster=with_numbers(self.cluster, numbers) if numbers else self.cluster,
            fixed={name: value for name, value in fixed.items() if value != OPEN},
        )


def given_caps(
    cluster: Cluster, num_gpus: int, device_mem: str | None, host_mem: str | None
) -> Caps | None:
    """The caps of a GPU, of the host its share; None where neither is given.

    Raises:
        SizeError: a cap cannot be read, or is more than there is.
    """
    if device_mem is None and host_mem is None:
        return None
    on_node = min(cluster.count("gpus_per_node"), num_gpus)
    return caps_of(share_of(machine_of(cluster), on_node), device_mem, host_mem)


def full_name(name: str) -> str:
    """Of a number its name with what it is of: `cluster.nic_bytes_per_s` of `nic_bytes_per_s`.

    Raises:
        LayoutError: nothing is called so; says what was probably meant.
    """
    if name in NAMES or name.startswith((CLUSTER_NUMBER, MACHINE_NUMBER)):
        return name
    if name in CLUSTER_NUMBERS or name.startswith("levels."):
        return CLUSTER_NUMBER + name
    if name in NUMBER_FIELDS:
        return MACHINE_NUMBER + name
    hint = nearest(name, [*NAMES, *CLUSTER_NUMBERS, *NUMBER_FIELDS])
    raise LayoutError(f"'{name}' is nothing of a layout, a cluster or its machine: {hint}")


def value_fault(name: str, value: object) -> str | None:
    """What a value of a name needs to be; None if it is that.

    >>> value_fault("gpus", 0), value_fault("tp", "open")
    ('needs a positive whole number, got 0', None)
    """
    if name in COUNTS:
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        return None if whole else f"needs a positive whole number, got {value!r}"
    if name in RECIPE_NAMES:
        known = _known_of_recipe(name)
        return None if value in known else f"needs one of {', '.join(known)}, got {value!r}"
    if name in LAYOUT_NAMES:
        return None if value == OPEN else _layout_fault(name, value)
    return _number_fault(name, value)


def _known_of_recipe(name: str) -> tuple[str, ...]:
    if name == "precision":
        return tuple(MATMULS_OF_PRECISION)
    return get_args(Recipe.model_fields[name].annotation)


def _with_recipe(job: Job, values: Mapping[str, Value]) -> Job:
    """With other values of the recipe; fp8 and fp4 are of the kernel set megatron."""
    fields: dict[str, Any] = {n: values[n] for n in RECIPE_NAMES[1:] if n in values}
    if "precision" in values:
        matmuls = MATMULS_OF_PRECISION[str(values["precision"])]
        kernels = job.recipe.kernels
        if matmuls != "model":
            if kernels is not None and kernels.vector != "megatron" and not job.any_kernels:
                raise LayoutError(
                    f"precision {values['precision']} is of the kernel set megatron, not of "
                    f"{kernels.vector}"
                )
            attention = "flash" if kernels is None else kernels.attention
            fields["kernels"] = KernelChoice(
                vector="megatron", attention=attention, matmuls=matmuls, deterministic=False
            )
        elif kernels is not None and kernels.matmuls != "model":
            as_model = kernels.model_copy(update={"matmuls": "model"})
            fields["kernels"] = None if job.any_kernels else as_model
    return job.model_copy(update={"recipe": job.recipe.model_copy(update=fields)})


def _layout_fault(name: str, value: object) -> str | None:
    if value is None:
        return f"needs a value, or '{OPEN}'"
    try:
        Layout.model_validate({name: value})
    except ValidationError as error:
        said = error.errors()[0]["msg"].replace("Input should be", "needs to be")
        return f"{said}, or '{OPEN}', got {value!r}"
    return None


def _number_fault(name: str, value: object) -> str | None:
    if isinstance(value, str) and name.endswith("_bytes"):
        try:
            _number(value)
        except SizeError as error:
            return f"is no size: {error}"
        return None
    if not isinstance(value, int | float) or isinstance(value, bool):
        also = ' or a size such as "24GiB"' if name.endswith("_bytes") else ""
        return f"needs a number{also}, got {value!r}"
    return None


def _number(value: Value) -> float:
    return float(parse_bytes(value)) if isinstance(value, str) else float(value)

"""One way to name and check a query's values: in a sweep's file, on the command line, in Python.

Names are those of options; those of numbers begin with `machine.` or `cluster.`.
"""

from collections.abc import Container, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError

from twinstream.cost.bill import prices_of
from twinstream.hardware_profiles.clusters.schema import CLUSTER_NUMBERS
from twinstream.hardware_profiles.link import LINK_FIELDS
from twinstream.hardware_profiles.profile_files import nearest
from twinstream.hardware_profiles.schema import NUMBER_FIELDS
from twinstream.models.kernel_costs.attention_limits import attention_names
from twinstream.models.layouts.layout import RUN_PIPELINES, Layout
from twinstream.models.loss import LOSSES, names_loss
from twinstream.models.recipes.recipe import MATMULS_OF_PRECISION
from twinstream.options.plan_options import ClusterOptions, PlanOptions
from twinstream.options.recipe_options import RecipeOptions
from twinstream.options.step_options import RankOptions
from twinstream.planner.kernel_choice import KernelsOption
from twinstream.planner.policies import policy_names
from twinstream.schedule.python_file import split_name
from twinstream.schedule.sizes import SizeError, parse_bytes, parse_number
from twinstream.study.answer import LAYOUT_OF_CLUSTERS, LAYOUT_OF_RANKS, StudyError

Value = str | bool | int | float
Values = Mapping[str, Value]
Kind = Literal["device", "ranks", "cluster"]
"""What a query is of: one device, ranks that run here, or GPUs of a cluster by any kernels."""

PRICE = "price_per_gpu_hour"
MACHINE_NUMBER, CLUSTER_NUMBER = "machine.", "cluster."
OPEN = "open"  # of a layout's field: the search chooses
NOT_ASKED = "none"  # of adapters and of what is frozen
COUNTS = ("gpus", "global_batch")
STEP_COUNTS = ("seq_len", "tokens_per_step", "chunk_tokens", "chunks_per_round")
MEMORY_CAPS = ("device_mem", "host_mem")
_PLACES = ("model", "machine", "cluster")
# A sweep runs no code of a model's folder, and nothing but `plan` shows several layouts.
_NO_VALUES = ("trust_remote_code", "keep")
_RECIPE = tuple(name for name in RecipeOptions.model_fields if name not in _NO_VALUES)
_OPTIONS = {
    name: field
    for group in (PlanOptions, ClusterOptions)
    for name, field in group.model_fields.items()
    if name not in _NO_VALUES
}
_FIRST = (*STEP_COUNTS, *MEMORY_CAPS)
_OF_DEVICE = (
    *_FIRST,
    *(n for n in PlanOptions.model_fields if n in _OPTIONS and n not in (*_PLACES, *_FIRST)),
)
LAYOUT_NAMES = (
    "tp", "cp", "pp", "dp", "ep", "virtual_stages", "micro_batch", "pipeline", "zero", "recompute",
    "sequence_parallel", "dp_overlap", "shard", "expert_imbalance", "offload", "etp", "tp_overlap",
    "capacity_factor", "expert_nodes",
)  # fmt: skip
_NOT_OF_RANKS = ("policy", "effort", "prefetch", "optimizer_overhead")

NAMES: Mapping[Kind, tuple[str, ...]] = {
    "device": ("model", "machine", *_OF_DEVICE),
    "ranks": (
        *_PLACES, "ranks", *(n for n in _OF_DEVICE if n not in _NOT_OF_RANKS),
        *RankOptions.model_fields,
    ),
    "cluster": (
        "model", "cluster", *COUNTS, "seq_len", "tokens_per_step", "chunk_tokens", *MEMORY_CAPS,
        "precision", "precision_units", *_RECIPE, "kernels", "attention", "nondeterministic",
        "clips", *LAYOUT_NAMES,
    ),
}  # fmt: skip
REQUIRED: Mapping[Kind, tuple[str, ...]] = {
    "device": ("model", "machine", "seq_len"),
    "ranks": ("model", "seq_len", "ranks"),
    "cluster": ("model", "cluster", "gpus", "seq_len"),
}
_OF_LAYOUT = (
    "layout", "step_s", "tokens_per_s", "tokens_per_s_per_gpu", "mfu", "memory_bytes",
)  # fmt: skip
_SHARES = ("compute_share", "communication_share", "bubble_share", "bound_s", "gap")
_CUT = ("rounds_per_step", "chunks_per_round", "planned_chunk_tokens")
_ERROR = ("expected_error_mean", "expected_error_kind")
COLUMNS: Mapping[Kind, tuple[str, ...]] = {
    "device": (
        "tokens_per_s", "model_tflop_per_s", "mfu", "hfu", "step_time_s", "lower_bound_s", "gap",
        "gap_family", "limits", "idle_fraction", "recompute_fraction", "device_peak_bytes",
        "host_peak_bytes", "h2d_bytes", "d2h_bytes", *_CUT, *_ERROR,
    ),
    "ranks": (
        *_OF_LAYOUT, "host_bytes", "room_bytes", *_SHARES, "recompute_fraction", *_CUT, *_ERROR,
        *(f"layout.{name}" for name in LAYOUT_OF_RANKS),
    ),
    "cluster": (
        *_OF_LAYOUT, "room_bytes", *_SHARES, "num_layouts", "num_fit", "num_simulated", *_ERROR,
        *(f"layout.{name}" for name in LAYOUT_OF_CLUSTERS),
    ),
}  # fmt: skip
"""The names of an answer's figures, by kind."""
_LINKS = (*MEMORY_CAPS, *(f"{MACHINE_NUMBER}{field}" for field in LINK_FIELDS))
DEVICE_MEMORY = f"{MACHINE_NUMBER}device_memory_bytes"
RESOURCES: Mapping[Kind, tuple[str, ...]] = {
    "device": _LINKS,
    "ranks": _LINKS,
    "cluster": (
        DEVICE_MEMORY, "device_mem", "cluster.nic_bytes_per_s", "cluster.node_bytes_per_s",
    ),
}  # fmt: skip
"""The names of values of which more is never slower, by kind."""


def _texts_of(annotation: Any) -> tuple[str, ...]:
    """The texts of a literal, which may be None."""
    if get_origin(annotation) is Literal:
        return tuple(text for text in get_args(annotation) if isinstance(text, str))
    return tuple(text for kind in get_args(annotation) for text in _texts_of(kind))


CHOICES: Mapping[str, tuple[str, ...]] = {
    **{name: texts for name, field in _OPTIONS.items() if (texts := _texts_of(field.annotation))},
    "policy": (*policy_names(),),
    "kernels": (*get_args(KernelsOption), "megatron"),
    "attention": ("auto", *attention_names()),
}
"""The texts that some options may have."""


def kind_of(names: Container[str]) -> Kind:
    """Tell what a query of values of these names is of."""
    if "ranks" in names:
        return "ranks"
    return "cluster" if "cluster" in names else "device"


def missing_of(names: Container[str]) -> str | None:
    """The first name that a query cannot do without, if one is missing."""
    kind = kind_of(names)
    missing = next((name for name in REQUIRED[kind] if name not in names), None)
    if missing is None and kind == "cluster":
        counted = "global_batch" in names or "tokens_per_step" in names
        return None if counted else "global_batch is missing, or tokens_per_step"
    return None if missing is None else f"{missing} is missing"


def fault_of(kind: Kind, name: str, value: object) -> str | None:
    """Say what a value needs to be, or its name; None if both are right."""
    if is_price(name):
        is_one = not isinstance(value, str) and prices_of(value) is not None
        return None if is_one else f"needs a price from 0, got {value!r}"
    prefixes = _prefixes(kind)
    if name.startswith(prefixes):
        return _number_fault(name, value)
    if name in NAMES[kind]:
        return _option_fault(kind, name, value)
    if any(name in names for names in NAMES.values()):
        mine, others = ("cluster", "machines") if kind == "cluster" else ("machine", "clusters")
        return f"is of {others}, and this is of a {mine}"
    known = [*NAMES[kind], PRICE, *(f"{prefix}<number of its profile>" for prefix in prefixes)]
    return f"is nothing that can be changed: {nearest(name, known)}"


def is_price(name: str) -> bool:
    """Return whether a value is the price of an hour of a GPU, which is no part of a query."""
    return name == PRICE or name.startswith(f"{PRICE}.")


def _prefixes(kind: Kind) -> tuple[str, ...]:
    return (CLUSTER_NUMBER, MACHINE_NUMBER) if kind == "cluster" else (MACHINE_NUMBER,)


def _option_fault(kind: Kind, name: str, value: object) -> str | None:
    of_layout = name in LAYOUT_NAMES or name in RankOptions.model_fields
    if of_layout and not (kind == "device" and name == "recompute"):
        if kind == "ranks" and name == "pipeline" and value not in (*RUN_PIPELINES, OPEN):
            return f"needs one of {', '.join(RUN_PIPELINES)}"
        return None if value == OPEN else _layout_fault(name, value)
    if name in (*COUNTS, *STEP_COUNTS):
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        return None if whole else f"needs a positive whole number, got {value!r}"
    if name == "ranks":
        several = isinstance(value, int) and not isinstance(value, bool) and value >= 2
        return None if several else f"needs a whole number from 2, got {value!r}"
    if name in MEMORY_CAPS:
        return _size_fault(value)
    if name == "precision":
        known = tuple(MATMULS_OF_PRECISION)
        return None if value in known else f"needs one of {', '.join(known)}, got {value!r}"
    field = _OPTIONS.get(name)
    if field is not None and field.annotation is bool:
        return None if isinstance(value, bool) else f"needs true or false, got {value!r}"
    if field is not None and float in get_args(field.annotation):
        return _number_fault(name, value)
    return _text_fault(name, value)


def _text_fault(name: str, value: object) -> str | None:
    if not isinstance(value, str):
        return f"needs a text in quotes, got {value!r}"
    if name == "loss" and not names_loss(value):
        return f"needs {', '.join(map(repr, LOSSES))}, perhaps with options, got '{value}'"
    known = CHOICES.get(name)
    is_own = name == "policy" and split_name(value) is not None
    if known is None or value in known or is_own:
        return None
    own = ", or FILE.py:NAME of your own" if name == "policy" else ""
    return f"'{value}' is unknown; known: {', '.join(known)}{own}"


def _size_fault(value: object) -> str | None:
    if not isinstance(value, str | int) or isinstance(value, bool):
        return f'needs a size such as "24GiB", "80%" or bytes, got {value!r}'
    try:  # of how much a share is, only a machine tells
        size_bytes = value if isinstance(value, int) else parse_bytes(value, whole_bytes=2.0**40)
    except SizeError as error:
        return f"is no size: {error}"
    return None if size_bytes >= 1 else f"needs a size of at least a byte, got {value!r}"


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
            number_of(value)
        except SizeError as error:
            return f"is no size: {error}"
        return None
    if not isinstance(value, int | float) or isinstance(value, bool):
        also = ' or a size such as "24GiB"' if name.endswith("_bytes") else ""
        return f"needs a number{also}, got {value!r}"
    return None


def number_of(value: Value) -> float:
    """A number, or the bytes of a size such as `24GiB`."""
    return float(parse_bytes(value)) if isinstance(value, str) else float(value)


def numbers_among(values: Values) -> dict[str, float]:
    """The numbers of profiles, by their names without `cluster.`."""
    prefixes = (CLUSTER_NUMBER, MACHINE_NUMBER)
    return {
        name.removeprefix(CLUSTER_NUMBER): number_of(value)
        for name, value in values.items()
        if name.startswith(prefixes)
    }


def written_options(values: Values) -> dict[str, Any]:
    """Values as options have them: several patterns or homes have commas in between, or are
    `none`, as adapters may be."""
    found: dict[str, Any] = dict(values)
    if found.get("lora") == NOT_ASKED:
        found["lora"] = None
    for name in ("freeze", "home"):
        if name in found:
            found[name] = () if found[name] == NOT_ASKED else tuple(found[name].split(","))
    return found | {n: str(found[n]) for n in ("seq_len", *MEMORY_CAPS) if n in found}


def written_values(texts: Sequence[str], kind: Kind) -> Mapping[str, Value]:
    """Values by their full names of `nic_bytes_per_s=1e11`, `gpus=1024`, `tp=open`.

    Raises:
        StudyError: a text is none, names nothing that is known, or something twice.
    """
    values: dict[str, Value] = {}
    for text in texts:
        name, equals, written = (part.strip() for part in text.partition("="))
        if not equals or not written:
            raise StudyError(f"--set '{text}' has no value; write it as hbm_bytes_per_s=4e12")
        full = name if name == PRICE else full_name(kind, name)
        value = _read(written)
        if (fault := fault_of(kind, full, value)) is not None:
            raise StudyError(f"--set {name} {fault}")
        if full in values:
            raise StudyError(f"--set names '{name}' twice")
        values[full] = value
    return values


def full_name(kind: Kind, name: str) -> str:
    """Return a name with what it is of: `machine.hbm_bytes_per_s` for `hbm_bytes_per_s`.

    Raises:
        StudyError: nothing is called so; says what was probably meant.
    """
    if name in NAMES[kind] or name.startswith(_prefixes(kind)):
        return name
    if kind == "cluster" and (name in CLUSTER_NUMBERS or name.startswith("levels.")):
        return CLUSTER_NUMBER + name
    if name in NUMBER_FIELDS or (kind != "cluster" and name.startswith("efficiency.")):
        return MACHINE_NUMBER + name
    of_cluster = CLUSTER_NUMBERS if kind == "cluster" else ()
    hint = nearest(name, [*NAMES[kind], *of_cluster, *NUMBER_FIELDS])
    what = "a layout, a cluster or its machine" if kind == "cluster" else "a plan or a machine"
    raise StudyError(f"'{name}' is nothing of {what}: {hint}")


def _read(text: str) -> Value:
    """A number or a truth where it is one, else the text: `8k`, but `8b` is a model."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text[-1:].lower() == "k" and (count := parse_number(text)) is not None:
        return count
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text

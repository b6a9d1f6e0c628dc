"""What a card can do with a model: ways to train it, by lengths, on machines side by side.

Each cell is a plan of its own of the same tokens a step: quickly at first, then by more search.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from math import ceil
from shlex import quote

from twinstream.hardware_profiles.cost import PEAK_OF_DTYPE
from twinstream.hardware_profiles.schema import Number
from twinstream.measures.residence import checkpoint_bytes
from twinstream.measures.wear import written_bytes
from twinstream.models.loss import kind_of_loss
from twinstream.models.presets import download_of, folder_of
from twinstream.models.providers.model import AnyModel, model_of
from twinstream.models.providers.trained import read_lora
from twinstream.models.recipes.recipe import Recipe
from twinstream.planner.infeasible import InfeasiblePlan
from twinstream.planner.planner import Planner
from twinstream.planner.request import caps_of
from twinstream.schedule.document import Caps
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.node import Node, records_html
from twinstream.schedule.workload import Packing
from twinstream.study.answer import Answer
from twinstream.study.layouts import LayoutQuery
from twinstream.study.one_device import DeviceQuery
from twinstream.study.processes import answers_of
from twinstream.study.query import Loader
from twinstream.study.questions import query_of
from twinstream.study.values import Values

LORA = "r=16"
LENGTHS = (2048, 8192, 32768)
TOKENS_PER_STEP = 65536
_HOUR_S = 3600.0
_DISK_MEM = "4TB"


@dataclass(frozen=True)
class Way:
    """One way to train: its name, and what a query and `train` are told of it."""

    name: str
    values: Values

    @property
    def flags(self) -> str:
        """Of the commands `plan` and `train`."""
        return _flags(self.values)


def ways(lora: str = LORA, loss: str | None = None) -> tuple[Way, ...]:
    """From all weights to adapters beside a base in few bits."""
    told: Values = {} if loss is None else {"loss": loss}
    return (
        Way("full", told),
        Way("full, 8-bit optimizer", {"optimizer_state": "8bit", **told}),
        Way("LoRA", {"lora": lora, **told}),
        Way("LoRA, base in 8 bits", {"lora": lora, "base": "8bit", **told}),
        Way("LoRA, base in nf4", {"lora": lora, "base": "nf4", **told}),
    )


@dataclass(frozen=True)
class OwnLengths:
    """A data set's own lengths as a column: the longest, and how documents fill a chunk of it."""

    seq_len: int
    packing: Packing


class FitCell(Node):
    """One way on GPUs of a machine at one length; what is predicted is None where it does not fit.

    Fields:
        gpus: of one machine; `layout` is the fastest that was found for several. Bytes are then
            those of the fullest.
        seq_len: tokens of the longest sequence; `is_own` are the data's own lengths, packed.
        error: mean error of the prediction, as a fraction, None where none is known.
        mfu: of the peak that the machine's profile states.
        limits: what the lower bound hangs on; `gap` is how far above it the step is.
        checkpoint_bytes: on the disk, of weights and optimizer state that are trained; of one GPU.
        hours, money: of the data, where they and a price were given; of pairs without the forward
            pass over them that the reference takes before the first step.
        lacking_device_bytes, lacking_host_bytes: what is missing at least of one memory with the
            other as it is, by the lower bound; None where no size would do, or it fits.
        refused: why it cannot be, if not for want of memory.
        kept_in: dtypes of weights, gradients and optimizer state.
        with_disk: whether it is planned beside a drive, to which `disk_bytes_a_day` are written.
        not_on_gpus: what of it has not yet run on a GPU; empty on a CPU.
        command: that trains so; `plan_command` gives the same prediction.
        effort: of the search.
    """

    machine: str
    gpus: int = 1
    way: str
    seq_len: int
    is_own: bool
    with_disk: bool = False
    disk_bytes_a_day: float | None = None
    tokens_per_step: int
    layout: str = ""
    tokens_per_s: float | None = None
    error: float | None = None
    mfu: float | None = None
    limits: tuple[str, ...] = ()
    gap: float | None = None
    device_bytes: int | None = None
    host_bytes: int | None = None
    checkpoint_bytes: int | None = None
    hours: float | None = None
    money: float | None = None
    lacking_device_bytes: int | None = None
    lacking_host_bytes: int | None = None
    refused: str = ""
    kept_in: str = ""
    not_on_gpus: tuple[str, ...] = ()
    command: str
    plan_command: str
    effort: str

    @property
    def where(self) -> str:
        """The machine, and how many of its GPUs."""
        return where_of(self.machine, self.gpus)

    @property
    def fits(self) -> bool:
        """Whether there is a plan."""
        return self.tokens_per_s is not None


def where_of(machine: str, gpus: int) -> str:
    """A machine with so many GPUs.

    >>> where_of("rtx4090", 2)
    'rtx4090, 2 GPUs'
    """
    return machine if gpus == 1 else f"{machine}, {gpus} GPUs"


class FitTable(Node):
    """All cells, machine by machine, by number of GPUs, way by way, length by length.

    `peaks` says by machine what MFU is a share of, and where that number is from, `caps` by place
    what memory plans may take of each GPU; `download` how weights of a model of the hub are
    fetched, into the folder that commands name. `loss` is that of pairs, None where it is cross
    entropy. `counts_bytes`: each byte of the data is a token.
    """

    model: str
    loss: str | None = None
    tokens_per_step: int
    dataset_tokens: int | None
    counts_bytes: bool = False
    cells: tuple[FitCell, ...]
    peaks: Mapping[str, str]
    caps: Mapping[str, Caps]
    download: str | None = None

    def records(self) -> list[dict[str, object]]:
        """A row for each cell."""
        return [cell.model_dump() for cell in self.cells]

    def _repr_html_(self) -> str:
        columns = ("machine", "gpus", "way", "seq_len", "tokens_per_s", "error", "mfu", "hours",
                   "money", "refused", "command")  # fmt: skip
        rows = [{name: record[name] for name in columns} for record in self.records()]
        return records_html(f"{self.model}, {self.tokens_per_step:,} tokens a step", rows)


@dataclass(frozen=True)
class FitQuestion:
    """What to try, and within which memory; caps are as of `plan`, None is what `train` takes.

    `gpus`: numbers of GPUs of each machine. `price_per_hour` is of a GPU, by machine. `data` is the
    name that commands are told. `loss` is `dpo` with its options, of pairs of sequences; None:
    cross entropy. `counts_bytes`: each byte of the data is a token. `disk_bandwidth` is that of a
    drive, `7GB/s,5GB/s`, with which every cell of one GPU is planned once more; None: without.
    `optimizer` says where updates are made, host or auto, of one GPU without a drive.
    """

    model: str
    machines: tuple[str, ...]
    gpus: tuple[int, ...] = (1,)
    lengths: tuple[int, ...] = LENGTHS
    tokens_per_step: int = TOKENS_PER_STEP
    lora: str = LORA
    device_mem: str | None = None
    host_mem: str | None = None
    own: OwnLengths | None = None
    dataset_tokens: int | None = None
    price_per_hour: Mapping[str, float] | None = None
    data: str = "DATA"
    loss: str | None = None
    counts_bytes: bool = False
    disk_mem: str | None = None
    disk_bandwidth: str | None = None
    optimizer: str | None = None


@dataclass(frozen=True)
class AskedCell:
    """One way on one machine at one length, and how hard its plan is looked for."""

    question: FitQuestion
    machine: str
    gpus: int
    way: Way
    seq_len: int
    own: OwnLengths | None
    effort: str
    advises: bool
    with_disk: bool = False

    @property
    def tokens(self) -> int:
        """Those asked for, in whole sequences, or pairs of them."""
        each = self.seq_len * kind_of_loss(self.question.loss).sides
        return ceil(self.question.tokens_per_step / each) * each

    @property
    def place(self) -> tuple[object, ...]:
        """What tells it from the others."""
        return (
            self.machine,
            self.gpus,
            self.way.name,
            self.seq_len,
            self.own is not None,
            self.with_disk,
        )

    @property
    def updates(self) -> Values:
        """Where they are made, if that is asked and can be."""
        optimizer = self.question.optimizer
        if optimizer is None or self.gpus > 1 or self.with_disk:
            return {}
        return {"optimizer": optimizer}

    @property
    def caps(self) -> dict[str, str]:
        told = {"device_mem": self.question.device_mem, "host_mem": self.question.host_mem}
        if self.with_disk:
            told |= {
                "disk_mem": self.question.disk_mem or _DISK_MEM,
                "disk_bandwidth": self.question.disk_bandwidth,
            }
        return {name: value for name, value in told.items() if value is not None}


def fit(
    question: FitQuestion, *, effort: str = "quick", num_jobs: int = 1,
    on_cell: Callable[[FitCell], object] = lambda cell: None,
    on_table: Callable[[FitTable], object] = lambda table: None,
) -> FitTable:  # fmt: skip
    """Plan every cell: all quickly first, then those that may get better by more search.

    Args:
        effort: quick or normal, the last that is tried.
        on_cell: is called with each cell as it comes, with those that got better once more.
        on_table: is called after that with all cells so far.

    Raises:
        TwinstreamError: there is no such model or machine, or LoRA's options cannot be read.
    """
    load, asked = Loader(), asked_cells(question, advises=effort == "quick")
    longest = max(one.seq_len for one in asked)
    spec = load.model(question.model, longest, loss=question.loss)
    read_lora(spec, question.lora)
    peaks = {name: _peak(load, name, spec) for name in question.machines}
    caps = {
        where_of(name, gpus): caps_of(
            load.machine(name), question.device_mem, question.host_mem, gpus
        )
        for name in question.machines
        for gpus in question.gpus
    }
    order = [one.place for one in asked]
    known: dict[tuple[object, ...], FitCell] = {}

    def table() -> FitTable:
        return FitTable(
            model=spec.name, loss=question.loss, tokens_per_step=question.tokens_per_step,
            dataset_tokens=question.dataset_tokens, counts_bytes=question.counts_bytes, peaks=peaks,
            caps=caps, download=download_of(question.model),
            cells=tuple(known[place] for place in order if place in known),
        )  # fmt: skip

    def take(cell: FitCell) -> None:
        place = cell.machine, cell.gpus, cell.way, cell.seq_len, cell.is_own, cell.with_disk
        known[place] = _faster(known.get(place, cell), cell)
        on_cell(cell)
        on_table(table())

    answers_of(answered_cell, asked, num_jobs, take)
    if effort != "quick":
        again = [replace(one, effort=effort, advises=True) for one in asked if one.gpus == 1]
        answers_of(answered_cell, again, num_jobs, take)
    return table()


def num_plans(question: FitQuestion, effort: str) -> int:
    """How often `on_cell` of `fit` is called."""
    asked = asked_cells(question, advises=False)
    return len(asked) + sum(one.gpus == 1 for one in asked) * (effort != "quick")


def asked_cells(question: FitQuestion, *, advises: bool) -> list[AskedCell]:
    """Every cell of a question, in the order of its table.

    `advises`: what does not fit is told what it lacks.
    """
    columns: list[tuple[int, OwnLengths | None]] = [(length, None) for length in question.lengths]
    if question.own is not None:
        columns.append((question.own.seq_len, question.own))
    return [
        AskedCell(question, machine, gpus, way, length, own, "quick", advises, with_disk)
        for machine in question.machines
        for gpus in question.gpus
        for way in ways(question.lora, question.loss)
        for with_disk in (False, True)
        if not with_disk or (question.disk_bandwidth is not None and gpus == 1)
        for length, own in columns
    ]


def _faster(one: FitCell, other: FitCell) -> FitCell:
    return one if (one.tokens_per_s or 0.0) > (other.tokens_per_s or 0.0) else other


def answered_cell(asked: AskedCell, planner: Planner) -> FitCell:
    """One plan, or why there is none."""
    make = partial(
        FitCell, machine=asked.machine, gpus=asked.gpus, way=asked.way.name, seq_len=asked.seq_len,
        is_own=asked.own is not None, with_disk=asked.with_disk, tokens_per_step=asked.tokens,
        command=_command(asked),
        plan_command=_plan_command(asked), effort=asked.effort,
    )  # fmt: skip
    values: Values = {
        "model": asked.question.model, "machine": asked.machine, "seq_len": asked.seq_len,
        "tokens_per_step": asked.tokens, **asked.caps, **asked.way.values, **asked.updates,
        **({"effort": asked.effort} if asked.gpus == 1 else {"ranks": asked.gpus}),
    }  # fmt: skip
    try:
        found = query_of(values, _loader())
        assert isinstance(found, DeviceQuery | LayoutQuery), "it is of a step on a machine"
        query: DeviceQuery | LayoutQuery = found
        if asked.own is not None:
            packing = asked.own.packing  # of one sequence of seq_len, or of both of a pair
            step = replace(query.request.step, packing=packing, seq_len=packing.tokens)
            query = replace(query, request=replace(query.request, step=step))
        answer = query.answer(planner=planner, advises=asked.advises)
    except InfeasiblePlan as error:
        device, host = error.shortage.proven or (None, None)
        caps = query.request.caps
        return make(
            lacking_device_bytes=_lacking(device, caps.device_bytes),
            lacking_host_bytes=_lacking(host, caps.host_bytes),
        )
    except TwinstreamError as error:
        return make(refused=str(error))
    return _predicted(asked, answer, make)


@cache
def _loader() -> Loader:
    """Of a process: a model is read, or traced, once for all its cells."""
    return Loader()


def _lacking(needed: int | None, has: int | None) -> int | None:
    return None if needed is None or has is None or needed <= has else needed - has


def _predicted(asked: AskedCell, found: Answer, make: Callable[..., FitCell]) -> FitCell:
    tokens, prices = asked.question.dataset_tokens, asked.question.price_per_hour or {}
    saved = checkpoint_bytes(found.schedule.only) if found.schedule.is_one_device else None
    written = None
    if asked.with_disk:
        step_s = asked.tokens / found.tokens_per_s
        written = written_bytes(found.schedule) / step_s * 24 * _HOUR_S
    hours = None if tokens is None else tokens / found.tokens_per_s / _HOUR_S
    price = prices.get(asked.machine)
    return make(
        tokens_per_s=found.tokens_per_s, error=found.uncertainty.symmetric, mfu=found.mfu,
        limits=found.limits, gap=found.gap, device_bytes=found.device_bytes,
        host_bytes=found.host_bytes, checkpoint_bytes=saved,
        hours=hours, kept_in=_kept_in(found), not_on_gpus=_not_on_gpus(found),
        layout=found.layout_text, disk_bytes_a_day=written,
        money=None if hours is None or price is None else hours * asked.gpus * price,
    )  # fmt: skip


def _kept_in(found: Answer) -> str:
    schedule = found.schedule.of(found.schedule.classes[0])
    recipe = Recipe.model_validate(schedule.recipe)
    dtype = model_of(schedule.model).dtype
    state, gradients = recipe.state_of(dtype), recipe.gradient_dtype(dtype)
    trained = "weights" if recipe.lora is None else "adapters"
    numbers = {"8bit": "8 bits", "float32_master": "float32 beside a float32 master"}
    base = "" if recipe.lora is None else f", base in {numbers.get(recipe.base, recipe.base)}"
    base = base.replace("model", dtype)
    if (gradients, state) == (dtype, "model"):
        return f"{trained}, gradients and optimizer state in {dtype}{base}"
    told = numbers.get(state, dtype)
    return f"{trained} in {dtype}, gradients in {gradients}, optimizer state in {told}{base}"


def _not_on_gpus(found: Answer) -> tuple[str, ...]:
    """What docs/benchmarks/gpu.md lists as not yet run on a GPU."""
    schedule = found.schedule.of(found.schedule.classes[0])
    recipe, model = Recipe.model_validate(schedule.recipe), schedule.model
    if found.machine.device != "cuda":
        return ()
    spec = model_of(model)
    told = {
        "models of other families": spec.own_code is not None,
        "mixtures of experts": spec.decoder is not None and spec.decoder.experts is not None,
        "8-bit state": recipe.state_of(spec.dtype) == "8bit",
        "LoRA": recipe.lora is not None,
        "a base in few bits": recipe.base != "model",
        recipe.loss.name.upper(): recipe.loss.name != "",
        "several GPUs": found.num_gpus > 1,
    }
    return tuple(name for name, is_so in told.items() if is_so)


def _command(asked: AskedCell) -> str:
    """What trains so; a length of the data's own is told as the longest."""
    question = asked.question
    parts = [
        f"twinstream train {quote(folder_of(question.model))} {question.data} -o DIR",
        asked.way.flags,
        f"--seq-len {asked.seq_len} --tokens-per-step {asked.tokens}",
        "" if asked.gpus == 1 else f"--ranks {asked.gpus}",
        "--disk PATH" if asked.with_disk else "",
        _flags(asked.caps),
        _flags({**asked.updates, "max_grad_norm": 0}) if asked.updates else "",
    ]  # fmt: skip
    return " ".join(filter(None, parts))


def _plan_command(asked: AskedCell) -> str:
    question = asked.question
    parts = [
        f"twinstream plan --model {quote(question.model)} --machine {quote(asked.machine)}",
        asked.way.flags,
        f"--seq-len {asked.seq_len} --tokens-per-step {asked.tokens}",
        f"--effort {asked.effort}" if asked.gpus == 1 else f"--gpus {asked.gpus}",
        _flags(asked.caps),
        _flags(asked.updates),
    ]  # fmt: skip
    return " ".join(filter(None, parts))


def _flags(values: Values) -> str:
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in values.items())


def _peak(load: Loader, name: str, spec: AnyModel) -> str:
    """What MFU on a machine is a share of, and where the number is from."""
    number: Number = getattr(load.machine(name), PEAK_OF_DTYPE[spec.dtype])
    told = "no limit" if number.value is None else f"{number.value / 1e12:,.0f} TFLOP/s"
    return f"{told} in {spec.dtype} ({number.kind}): {number.source}"

"""The best size, tokens and layout for GPUs and days, for FLOPs, or for money.

The FLOPs that GPUs reach in a time hang on the model and its layout, and the best size hangs on the
FLOPs: the size is found where both agree, with the speed that is predicted of each size tried.
"""

from collections.abc import Callable, Mapping
from math import inf
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, model_validator
from pydantic_core import PydanticCustomError

from twinstream.cost.bill import GpuHourPrice, price_at
from twinstream.hardware_profiles.clusters.loader import load_cluster, machine_of, place_names
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.presets import load_model
from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.node import Node, option, quantity, size
from twinstream.schedule.sizes import parse_number
from twinstream.study.answer import Answer, StudyError
from twinstream.study.optimum.laws import LawAnswer, flops_of, law_named, laws_at, loss_range
from twinstream.study.optimum.shapes import spec_near
from twinstream.study.query import Loader
from twinstream.study.questions import query_of
from twinstream.study.values import Value, written_values

_DAY_S, _HOUR_S = 86400.0, 3600.0
_FIRST_MFU = 0.4  # of the first size that is tried
_MOST_TRIES = 6
_ALIKE = 0.02  # of the FLOPs: the depth of a model moves in such steps
_BATCH_TOKENS, _BATCH_FLOPS = 4e6, 1e25  # davidsj/ml_par_sim, run_optimizer2.ipynb


def _read_counts(given: object) -> object:
    counts = list(map(parse_number, given.split(","))) if isinstance(given, str) else given
    if not isinstance(counts, list | tuple) or not all(isinstance(one, int) for one in counts):
        raise PydanticCustomError("counts", "needs whole numbers above 0, as 512 or 512,1024")
    return tuple(counts)


class OptimumQuestion(Node, title="Question", populate_by_name=True):
    """What is given, and what is left open; of days, flops and budget one is given."""

    cluster: Annotated[
        str, option("Whose GPUs (`twinstream clusters`).", unit="NAME|FILE")
    ] = "h100_dgx"  # fmt: skip
    gpus: Annotated[
        tuple[int, ...],
        BeforeValidator(_read_counts),
        option("GPUs; several make a curve: 512,1024,2048.", unit="LIST"),
    ]
    days: Annotated[
        float | None, quantity("Train so long on these GPUs.", "DAYS", gt=0)
    ] = None  # fmt: skip
    flops: Annotated[
        float | None, quantity("Train so many, as 1e24; 6 N D are counted.", "FLOPS", gt=0)
    ] = None  # fmt: skip
    budget: Annotated[
        float | None, quantity("Train for so much; needs --price.", "MONEY", gt=0)
    ] = None  # fmt: skip
    price_per_gpu_hour: GpuHourPrice = None
    law: Annotated[
        Literal["kaplan", "chinchilla-1", "chinchilla-2", "chinchilla-3", "besiroglu", "twenty"],
        option("kaplan, chinchilla-1, -2, -3 (its approaches), besiroglu (the third one fitted "
               "again) or twenty (tokens a parameter).", unit="NAME"),
    ] = "besiroglu"  # fmt: skip
    models: Annotated[
        tuple[str, ...],
        BeforeValidator(tuple),
        option("Choose the largest of these that ends in time, in place of any size; may be given "
               "again.", "model", unit="NAME|FILE"),
    ] = ()  # fmt: skip
    shape: Annotated[
        Literal["llama", "gpt"], option("llama or gpt: how any size is built.", unit="NAME")
    ] = "llama"
    seq_len: Annotated[int, size("Tokens of a sequence.")] = 2048
    global_batch: Annotated[
        int | None, size("Sequences of a step; by default 4e6 x (FLOPs / 1e25)^(1/6) tokens.")
    ] = None
    settings: Annotated[
        tuple[str, ...],
        BeforeValidator(tuple),
        option("Of the layout or the cluster, as in `whatif`: tp=8, nic_bytes_per_s=5e9; may be "
               "given again.", "set", unit="NAME=VALUE"),
    ] = ()  # fmt: skip

    @model_validator(mode="after")
    def _is_clear(self) -> Self:
        given = [name for name in ("days", "flops", "budget") if getattr(self, name) is not None]
        if len(given) != 1:
            told = " and ".join(f"--{name}" for name in given) or "none of them"
            raise StudyError(f"give --days, --flops or --budget, one of them; got {told}")
        if self.budget is not None and not self.price_per_gpu_hour:
            raise StudyError("--budget needs --price, of a GPU-hour and above 0: --price 2.5")
        if not self.gpus or min(self.gpus) < 1:
            raise StudyError("--gpus needs whole numbers from 1, as 512 or 512,1024")
        return self


class SizedRun(Node):
    """One size on so many GPUs.

    Fields:
        flops: 6 N D, as laws count.
        error: of the speed; days have it, too.
        loss: by the law, None where it states none; loss_low, loss_high: of all laws that state
            one, with the tokens off by the error of the speed.
        ends_in_time: within the days or the money that are given.
    """

    gpus: int
    model: str
    params: int
    tokens: float
    flops: float
    seq_len: int
    global_batch: int
    layout: str
    tokens_per_s: float
    error: float | None
    mfu: float
    days: float
    gpu_hours: float
    money: float | None
    loss: float | None
    loss_low: float
    loss_high: float
    ends_in_time: bool


class OptimumAnswer(Node):
    """The best run on each number of GPUs, and all that were tried.

    Fields:
        best: one of each number of GPUs for which one ends in time.
        refused: why there is none on other numbers of GPUs.
        at_full_peak: by number of GPUs, where a time is given, the parameters that the law has at
            100 % of the peak, and the days that they take at the MFU of the best.
        laws: all laws at the FLOPs of the first best one.
    """

    cluster: str
    law: str
    source: str
    best: tuple[SizedRun, ...]
    tried: tuple[SizedRun, ...]
    refused: Mapping[int, str]
    at_full_peak: Mapping[int, tuple[float, float]]
    laws: tuple[LawAnswer, ...]

    def records(self) -> list[dict[str, object]]:
        """A row for each run that was tried."""
        return [run.model_dump() for run in self.tried]


class _ShapedLoader(Loader):
    """Finds one model that has no file, by any name."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        found: Any = lambda *_, **__: spec  # noqa: E731
        self.model = found


def predicted_step(asked: OptimumQuestion, spec: ModelSpec, gpus: int, batch: int) -> Answer:
    """The fastest layout of a model on so many GPUs, as `plan --cluster` finds it.

    Raises:
        TwinstreamError: no layout can be or fits, or a setting is wrong.
    """
    values: dict[str, Value] = {
        "model": spec.name, "cluster": asked.cluster, "gpus": gpus, "seq_len": asked.seq_len,
        "global_batch": batch,
    }  # fmt: skip
    query = query_of(values, _ShapedLoader(spec))
    if asked.settings:
        query = query.changed(written_values(asked.settings, query.kind))
    return query.answer(advises=False)


Predict = Callable[[OptimumQuestion, ModelSpec, int, int], Answer]


def find_optimum(
    asked: OptimumQuestion, predict: Predict = predicted_step,
    on_run: Callable[[str], object] = lambda text: None,
) -> OptimumAnswer:  # fmt: skip
    """The best run on each number of GPUs.

    Raises:
        TwinstreamError: a name is unknown, or nothing fits or ends in time on any number of GPUs.
    """
    search, best, refused = _Search(asked, predict, on_run), [], {}
    for gpus in dict.fromkeys(asked.gpus):
        try:
            best.append(search.best_on(gpus))
        except TwinstreamError as error:
            refused[gpus] = str(error)
    if not best:
        raise StudyError(f"on {asked.gpus[-1]:,} GPUs: {refused[asked.gpus[-1]]}")
    return OptimumAnswer(
        cluster=search.cluster.name, law=search.law.name, source=search.law.source,
        best=tuple(best), tried=tuple(search.tried), refused=refused, laws=laws_at(best[0].flops),
        at_full_peak={run.gpus: found for run in best if (found := search.at_full_peak(run))},
    )  # fmt: skip


class _Search:
    """Runs that are predicted, each size on each number of GPUs once."""

    def __init__(
        self, asked: OptimumQuestion, predict: Predict, on_run: Callable[[str], object]
    ) -> None:
        self.asked, self.law = asked, law_named(asked.law)
        self.cluster, self.tried = load_cluster(asked.cluster), list[SizedRun]()
        self._predict, self._on_run = predict, on_run
        self._peak = machine_of(self.cluster).number("peak_bf16_flop_per_s")
        self._price = price_at(asked.price_per_gpu_hour, place_names(self.cluster))
        if asked.price_per_gpu_hour is not None and self._price is None:
            raise StudyError(f"no price is of {self.cluster.name}: write {self.cluster.name}=2.5")

    def _seconds_on(self, gpus: int) -> float | None:
        """The time that is given, or paid for; None where FLOPs are given."""
        if self.asked.budget is not None and self._price is not None:
            return self.asked.budget / self._price / gpus * _HOUR_S
        return None if self.asked.days is None else self.asked.days * _DAY_S

    def best_on(self, gpus: int) -> SizedRun:
        """The largest of the models that ends in time, or the size at which FLOPs and law agree.

        With a time and a law that states a loss, the size of the least loss of those tried.

        Raises:
            TwinstreamError: none does, or no layout fits.
        """
        if self.asked.models:
            return self._of_models(gpus)
        seconds, law, known = self._seconds_on(gpus), self.law, dict[str, SizedRun]()
        flops = self.asked.flops or (seconds or 0.0) * gpus * self._peak * _FIRST_MFU
        for _ in range(_MOST_TRIES):
            spec = spec_near(law.params(flops), self.asked.shape, self.asked.seq_len)
            if spec.name in known:
                break
            run = known[spec.name] = self._run(spec, gpus, flops)
            if seconds is None or abs(run.flops / flops - 1) < _ALIKE:
                break
            flops = run.flops
        if law.loss is None:
            return known[spec.name]
        return min(known.values(), key=lambda run: run.loss or inf)

    def _of_models(self, gpus: int) -> SizedRun:
        runs = []
        for name in self.asked.models:
            spec = load_model(name, longest=self.asked.seq_len)
            tokens = self.law.tokens_of(spec.num_parameters)
            if self.asked.flops is not None:
                tokens = self.asked.flops / flops_of(spec.num_parameters, 1.0)
            flops = flops_of(spec.num_parameters, tokens)
            runs.append(self._run(spec, gpus, flops, tokens=tokens))
        if in_time := [run for run in runs if run.ends_in_time]:
            return max(in_time, key=lambda run: run.params)
        least = min(runs, key=lambda run: run.days)
        raise StudyError(
            f"none of {', '.join(self.asked.models)} ends in time: {least.model} with "
            f"{least.tokens:.4g} tokens takes {least.days:,.1f} days; give more, or smaller models"
        )

    def _run(
        self, spec: ModelSpec, gpus: int, flops: float, tokens: float | None = None
    ) -> SizedRun:
        """A size with these tokens, or with those that it trains in the time, or of the FLOPs."""
        asked, seconds, params = self.asked, self._seconds_on(gpus), spec.num_parameters
        self._on_run(f"{spec.name} on {gpus:,} GPUs")
        batch = asked.global_batch or self._batch(flops, gpus)
        found = self._predict(asked, spec, gpus, batch)
        if tokens is None:
            tokens = found.tokens_per_s * seconds if seconds else flops / flops_of(params, 1.0)
        taken_s, error = tokens / found.tokens_per_s, found.uncertainty.symmetric
        low, high = loss_range(params, tokens, error)
        hours = taken_s / _HOUR_S * gpus
        run = SizedRun(
            gpus=gpus, model=spec.name, params=params, tokens=tokens,
            flops=flops_of(params, tokens), seq_len=asked.seq_len, global_batch=batch,
            layout=found.layout_text, tokens_per_s=found.tokens_per_s, error=error, mfu=found.mfu,
            days=taken_s / _DAY_S, gpu_hours=hours,
            money=None if self._price is None else hours * self._price,
            loss=None if self.law.loss is None else self.law.loss.loss(params, tokens),
            loss_low=low, loss_high=high,
            ends_in_time=seconds is None or taken_s <= seconds * (1 + 1e-9),
        )  # fmt: skip
        self.tried.append(run)
        return run

    def _batch(self, flops: float, gpus: int) -> int:
        """Sequences of a step: whole ones a node, so that replicas divide them."""
        nodes = max(1, gpus // self.cluster.count("gpus_per_node"))
        tokens = float(_BATCH_TOKENS * (flops / _BATCH_FLOPS) ** (1 / 6))
        return max(1, round(tokens / self.asked.seq_len / nodes)) * nodes

    def at_full_peak(self, run: SizedRun) -> tuple[float, float] | None:
        """Parameters at 100 % of the peak in the time given, and the days that they really take."""
        seconds = self._seconds_on(run.gpus)
        if seconds is None:
            return None
        flops = seconds * run.gpus * self._peak
        return self.law.params(flops), flops / run.flops * run.days

"""A step of a layered model on two streams: compute, and one collective at a time beside it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from twinstream.layered.strategy import (
    GpuMesh,
    Spread,
    SpreadLevel,
    Strategy,
    StrategyError,
    spread_of,
)
from twinstream.models.layered.kinds import LayerPart
from twinstream.models.layered.model import LayeredModel

TaskName = Literal["pretrain", "finetune", "inference"]
Kind = Literal["products", "lookup", "all_to_all", "all_reduce", "all_gather", "reduce_scatter"]
COLLECTIVES: tuple[Kind, ...] = ("all_to_all", "all_reduce", "all_gather", "reduce_scatter")
_KINDS: tuple[Kind, ...] = ("products", "lookup", *COLLECTIVES)


@dataclass(frozen=True)
class LayeredTask:
    """What is done: a batch of samples of all GPUs, trained or not; frozen layers or classes.

    `prefetch`: in backward the next gather goes ahead of the reductions of what is computed now.
    `recompute`: backward computes each part again, of which the input alone is kept.
    """

    batch: int
    name: TaskName = "pretrain"
    frozen: frozenset[str] = frozenset()
    prefetch: bool = True
    recompute: bool = False

    def trains(self, part: LayerPart) -> bool:
        """Return whether a part's parameters change."""
        return self.name != "inference" and not self.frozen & {part.layer, part.kind}


class StepPrices(Protocol):
    """The time of each piece of a step in ns; `passes` of backward are of inputs and of weights."""

    def products(self, part: LayerPart, spread: Spread, passes: int) -> float:
        """Return the time of a part's compute, forward (0 passes) or backward."""

    def lookup(self, part: LayerPart, spread: Spread, passes: int) -> float:
        """Return the time of reading, or changing, what a GPU looks up."""

    def exchange(self, part: LayerPart, spread: Spread, level: SpreadLevel) -> float:
        """Return the time in which what was looked up comes to the samples it is of."""

    def lookup_gradients(self, part: LayerPart, spread: Spread, level: SpreadLevel) -> float:
        """Return the time of the sum over replicas of the gradients of looked up rows."""

    def gather(self, part: LayerPart, spread: Spread, level: SpreadLevel) -> float:
        """Return the time in which sharded parameters come together."""

    def scatter(self, part: LayerPart, spread: Spread, level: SpreadLevel) -> float:
        """Return the time of the sum of gradients of sharded parameters."""

    def gradients(self, part: LayerPart, spread: Spread, level: SpreadLevel) -> float:
        """Return the time of the sum of gradients over replicas."""

    def activations(self, part: LayerPart, spread: Spread, level: SpreadLevel) -> float:
        """Return the time of the sum of a split part's outputs."""

    def dispatch(self, part: LayerPart, spread: Spread, level: SpreadLevel) -> float:
        """Return the time in which samples come to their experts, or back."""

    def update(self, part: LayerPart, spread: Spread) -> float:
        """Return the time of the optimizer's step."""

    def lost(self) -> float:
        """Return the share of compute that a collective beside it takes."""


class LayeredStepTime(NamedTuple):
    """A step: the whole, when compute ends, and the time of each kind of work."""

    step_ns: float
    compute_end_ns: float
    by_kind: dict[str, float]

    @property
    def compute_ns(self) -> float:
        return self.by_kind["products"] + self.by_kind["lookup"]

    @property
    def communication_ns(self) -> float:
        return sum(self.by_kind[kind] for kind in COLLECTIVES)

    @property
    def exposed_ns(self) -> float:
        """In which nothing is computed."""
        return self.step_ns - self.compute_ns

    @property
    def overlapped_ns(self) -> float:
        """Of communication, beside compute."""
        return self.communication_ns - self.exposed_ns


@dataclass
class _Streams:
    """Both streams, each in the order of issue."""

    compute_ns: float = 0.0
    communication_ns: float = 0.0
    by_kind: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_KINDS, 0.0))

    def compute(self, kind: Kind, time_ns: float, after: Sequence[float] = ()) -> float:
        self.by_kind[kind] += time_ns
        self.compute_ns = max(self.compute_ns, *after, 0.0) + time_ns
        return self.compute_ns

    def send(self, kind: Kind, time_ns: float, after: Sequence[float] = ()) -> float:
        self.by_kind[kind] += time_ns
        self.communication_ns = max(self.communication_ns, *after, 0.0) + time_ns
        return self.communication_ns

    def meet(self) -> None:
        self.compute_ns = self.communication_ns = max(self.compute_ns, self.communication_ns)


@dataclass(frozen=True)
class _Step:
    """A step that is issued on streams."""

    prices: StepPrices
    task: LayeredTask
    embeddings: tuple[tuple[LayerPart, Spread], ...]
    parts: tuple[tuple[LayerPart, Spread], ...]
    join: int
    streams: _Streams = field(default_factory=_Streams)

    def forward(self) -> None:
        looked_up = [self._look_up(part, spread) for part, spread in self.embeddings]
        ends: list[float] = []
        waits: list[float] = []
        for place, (part, spread) in enumerate(self.parts):
            room = ends[-2:-1]  # the part before the last is computed: its gathered weights go
            gathered = [self._gather(part, spread, room)]
            sent = self._dispatch(part, spread, ends[-1:])
            if place == self.join:
                waits += looked_up
            time_ns = self.prices.products(part, spread, 0)
            ends.append(self.streams.compute("products", time_ns, (*waits, *gathered, *sent)))
            waits = self._reduce_outputs(part, spread, part.reduces, ends[-1])

    def backward(self) -> None:
        ends: list[float] = []
        waits: list[float] = []
        exchanged: list[float] = []
        order = [(place, *self.parts[place]) for place in reversed(range(len(self.parts)))]
        order = [one for one in order if self._passes(one[0])]
        ahead = [self._gather(part, spread) for _, part, spread in order[: self.task.prefetch]]
        for step, (place, part, spread) in enumerate(order):
            if self.task.prefetch:
                gathered = ahead.pop()
                ahead += [self._gather(p, s) for _, p, s in order[step + 1 : step + 2]]
            else:
                gathered = self._gather(part, spread, ends[-2:-1])
            sent = self._dispatch(part, spread, ends[-1:])
            time_ns = self.prices.products(part, spread, self._passes(place))
            if self.task.recompute:
                time_ns += self.prices.products(part, spread, 0)
                ready = max((*ends[-1:], *waits), default=0.0)
                sent += self._reduce_outputs(part, spread, part.reduces, ready)
            ends.append(self.streams.compute("products", time_ns, (*waits, gathered, *sent)))
            waits = self._reduce_gradients(part, spread, ends[-1])
            if place == self.join:
                exchanged = self._return_looked_up((ends[-1], *waits))
        for part, spread in self.embeddings:
            if self.task.trains(part):
                time_ns = self.prices.lookup(part, spread, 1)
                self.streams.compute("lookup", time_ns, exchanged)

    def update(self) -> None:
        parts = [one for one in (*self.embeddings, *self.parts) if self.task.trains(one[0])]
        time_ns = sum(self.prices.update(part, spread) for part, spread in parts)
        if time_ns:
            self.streams.meet()
            self.streams.compute("products", time_ns)

    def _passes(self, place: int) -> int:
        """Of backward, those that a part has: of its inputs, if something before it is trained, and
        of its weights, if it is.
        """
        before = [part for part, _ in self.parts[:place]]
        if place >= self.join:
            before += [part for part, _ in self.embeddings]
        return any(map(self.task.trains, before)) + self.task.trains(self.parts[place][0])

    def _look_up(self, part: LayerPart, spread: Spread) -> float:
        end = self.streams.compute("lookup", self.prices.lookup(part, spread, 0))
        for level in spread.levels:
            if level.how == "shard":
                time_ns = self.prices.exchange(part, spread, level)
                end = self.streams.send("all_to_all", time_ns, (end,))
        return end

    def _return_looked_up(self, after: Sequence[float]) -> list[float]:
        ends = []
        for part, spread in self.embeddings:
            for level in spread.levels if self.task.trains(part) else ():
                if level.how == "shard":
                    time_ns = self.prices.exchange(part, spread, level)
                    ends.append(self.streams.send("all_to_all", time_ns, after))
                else:
                    time_ns = self.prices.lookup_gradients(part, spread, level)
                    ends.append(self.streams.send("all_reduce", time_ns, after))
        return ends

    def _gather(self, part: LayerPart, spread: Spread, after: Sequence[float] = ()) -> float:
        end = 0.0
        for level in spread.levels:
            if level.how == "fsdp":
                time_ns = self.prices.gather(part, spread, level)
                end = self.streams.send("all_gather", time_ns, after)
        return end

    def _dispatch(self, part: LayerPart, spread: Spread, after: Sequence[float]) -> list[float]:
        if part.experts == 1:
            return []
        return [
            self.streams.send("all_to_all", self.prices.dispatch(part, spread, level), after)
            for level in spread.levels
            if level.how == "tp"
        ]

    def _reduce_outputs(
        self, part: LayerPart, spread: Spread, reduces: bool, computed: float
    ) -> list[float]:
        ends = [
            self._send_outputs(part, spread, level, computed)
            for level in spread.levels
            if level.how == "tp" and reduces
        ]
        return ends + self._dispatch(part, spread, (computed,))

    def _send_outputs(
        self, part: LayerPart, spread: Spread, level: SpreadLevel, computed: float
    ) -> float:
        time_ns = self.prices.activations(part, spread, level)
        return self.streams.send("all_reduce", time_ns, (computed,))

    def _reduce_gradients(self, part: LayerPart, spread: Spread, computed: float) -> list[float]:
        """Of inputs and of weights, the inner level first; the latter are not waited for."""
        ends: list[float] = []
        for level in spread.levels:
            if level.how == "tp":
                alone = spread._replace(levels=(level,))
                ends += self._reduce_outputs(part, alone, part.reduces_back, computed)
            elif self.task.trains(part) and level.how == "fsdp":
                time_ns = self.prices.scatter(part, spread, level)
                self.streams.send("reduce_scatter", time_ns, (computed,))
            elif self.task.trains(part):
                time_ns = self.prices.gradients(part, spread, level)
                self.streams.send("all_reduce", time_ns, (computed,))
        return ends


def step_time(
    model: LayeredModel, strategy: Strategy, mesh: GpuMesh, task: LayeredTask, prices: StepPrices
) -> LayeredStepTime:
    """Return the time of a step, and of its pieces.

    Raises:
        StrategyError: the strategy does not fit the model, the GPUs or the batch; or nothing is
            trained.
    """
    chain = model.chain
    if task.name != "inference" and not any(map(task.trains, (*chain.embeddings, *chain.parts))):
        raise StrategyError("everything is frozen, and nothing would be trained")
    embeddings, parts = (
        tuple((part, spread_of(part, strategy, mesh, task.batch)) for part in group)
        for group in (chain.embeddings, chain.parts)
    )
    step = _Step(prices, task, embeddings, parts, chain.join)
    step.forward()
    if task.name != "inference":
        step.streams.meet()
        step.backward()
        step.update()
    streams = step.streams
    whole_ns = max(streams.compute_ns, streams.communication_ns)
    found = LayeredStepTime(whole_ns, streams.compute_ns, streams.by_kind)
    more_ns = prices.lost() * max(0.0, found.overlapped_ns)
    return found._replace(step_ns=whole_ns + more_ns, compute_end_ns=streams.compute_ns + more_ns)

"""How each class of layers is spread over the GPUs: one way over all, or two: in nodes, between."""

from math import prod
from typing import NamedTuple

from twinstream.models.layered.kinds import CLASSES, LayerPart
from twinstream.models.layered.model import LayeredModel
from twinstream.schedule.errors import TwinstreamError

HOWS = ("ddp", "fsdp", "tp", "shard")
_ALIASES = {"dp": "ddp", "zero3": "fsdp", "mp": "shard", "table": "shard"}
_OF_EMBEDDINGS, _OF_OTHERS = ("ddp", "shard"), ("ddp", "fsdp", "tp")
_OTHER_CLASS = "dense"  # whose way experts and transformers go if nothing is said of them


class StrategyError(TwinstreamError):
    """A strategy that cannot be; the message says why."""


class GpuGroup(NamedTuple):
    """Where the GPUs of a level are: `inside` a node, one of each node (`between`), or `all`."""

    where: str
    degree: int


class SpreadLevel(NamedTuple):
    """One way of spreading over the GPUs of a place."""

    how: str
    place: GpuGroup


class Spread(NamedTuple):
    """How a part is spread: its levels, the inner one first, and the samples of one GPU.

    Tensor parallel GPUs have the samples of their group; those that share tables have them all.
    """

    levels: tuple[SpreadLevel, ...]
    samples: int

    def degree(self, *hows: str) -> int:
        """Over how many GPUs it is spread in these ways together."""
        return prod(level.place.degree for level in self.levels if level.how in hows)

    @property
    def shards(self) -> int:
        """Into how many pieces its parameters are cut."""
        return self.degree("fsdp", "tp", "shard")

    @property
    def replicas(self) -> int:
        """Over how many GPUs, or groups of them, the batch is cut."""
        return self.degree("ddp", "fsdp")

    def within(self, level: SpreadLevel) -> tuple[SpreadLevel, ...]:
        """Return the levels inside one."""
        return self.levels[: self.levels.index(level)]


class GpuMesh(NamedTuple):
    """How many GPUs there are, and how many of them in a node."""

    gpus: int
    gpus_per_node: int

    @property
    def nodes(self) -> int:
        return self.gpus // self.gpus_per_node

    @property
    def has_levels(self) -> bool:
        """Whether inside a node and between nodes are two things."""
        return self.nodes > 1 and self.gpus_per_node > 1


Strategy = dict[str, tuple[str, ...]]


def parse_strategy(text: str, model: LayeredModel) -> Strategy:
    """Return ways by name of a layer or class: `embedding=shard,dense=fsdp/ddp`.

    Raises:
        StrategyError: a name, a way or the form is unknown.
    """
    found: Strategy = {}
    known = (*model.names, *CLASSES)
    for item in text.split(","):
        name, _, ways = (word.strip().lower() for word in item.partition("="))
        if not ways:
            raise StrategyError(
                f"--strategy needs NAME=WAY[/WAY],..., as embedding=shard,dense=fsdp/ddp; "
                f"got {item.strip()!r:.60}"
            )
        if name not in known:
            raise StrategyError(
                f"--strategy speaks of '{name}', which {model.name} has no layer or class of; it "
                f"has {', '.join(model.names)}"
            )
        if name in found:
            raise StrategyError(f"--strategy speaks of '{name}' twice")
        hows = tuple(_ALIASES.get(how.strip(), how.strip()) for how in ways.split("/"))
        found[name] = tuple(_of_class(how, name, model) for how in hows)
    return found


def strategy_text(strategy: Strategy) -> str:
    """Return a strategy as it is given.

    >>> strategy_text({"embedding": ("shard",), "dense": ("fsdp", "ddp")})
    'embedding=shard,dense=fsdp/ddp'
    """
    return ",".join(f"{name}={'/'.join(ways)}" for name, ways in strategy.items())


def spread_of(part: LayerPart, strategy: Strategy, mesh: GpuMesh, batch: int) -> Spread:
    """Return how a part is spread; what the strategy does not speak of is replicated.

    Raises:
        StrategyError: the ways do not fit the part or the GPUs, or the batch does not divide.
    """
    name = _name_of(part, strategy)
    ways = ("ddp",) if name is None else strategy[name]
    if len(ways) > 2 or len(set(ways)) < len(ways):
        raise StrategyError(
            f"{name}={'/'.join(ways)}: one way over all GPUs, or two that differ, in a node and "
            "between nodes"
        )
    if len(ways) == 2 and not mesh.has_levels:
        raise StrategyError(
            f"{name}={'/'.join(ways)} is of a node and of the network, and {mesh.gpus} GPUs are "
            f"{mesh.nodes} node(s) of {mesh.gpus_per_node}: give one way"
        )
    allowed = _OF_EMBEDDINGS if part.kind == "embedding" else _OF_OTHERS
    if wrong := [how for how in ways if how not in allowed]:
        raise StrategyError(f"{name}={wrong[0]}: {part.kind} can be {', '.join(allowed)}")
    places = [GpuGroup("all", mesh.gpus)]
    if len(ways) == 2:
        places = [GpuGroup("inside", mesh.gpus_per_node), GpuGroup("between", mesh.nodes)]
    levels = tuple(SpreadLevel(how, place) for how, place in zip(ways, places, strict=True))
    replicas = Spread(levels, 0).replicas
    if batch % replicas:
        raise StrategyError(
            f"a batch of {batch} samples does not divide over the {replicas} replicas of "
            f"{part.layer} ({'/'.join(ways)}): give a multiple of {replicas}"
        )
    spread = Spread(levels, batch // replicas)
    _require_division(part, spread.degree("tp"))
    return spread


def strategies(model: LayeredModel, mesh: GpuMesh, fixed: Strategy) -> tuple[Strategy, ...]:
    """Return every strategy by class that agrees with what is fixed."""
    chain = model.chain
    parts = (*chain.embeddings, *chain.parts)
    open_parts = [part for part in parts if _name_of(part, fixed) is None]
    found: list[Strategy] = [dict(fixed)]
    for kind in dict.fromkeys(part.kind for part in open_parts):
        hows = _OF_EMBEDDINGS if kind == "embedding" else _OF_OTHERS
        ways: list[tuple[str, ...]] = [(how,) for how in hows]
        if mesh.has_levels:
            ways += [(a, b) for a in hows for b in hows if a != b]
        found = [{**one, kind: way} for one in found for way in ways]
    return tuple(found)


def _require_division(part: LayerPart, tp: int) -> None:
    counts = {"heads": part.attention.heads if part.attention else 0}
    counts["experts"] = part.experts if part.experts > 1 else 0
    for what, count in counts.items():
        if count % tp:
            raise StrategyError(f"{count} {what} of {part.layer} do not divide over tp {tp}")


def _name_of(part: LayerPart, strategy: Strategy) -> str | None:
    """Return by which name a strategy speaks of a part: its layer's, its class's, `dense`."""
    names = (part.layer, part.kind, *([] if part.kind == "embedding" else [_OTHER_CLASS]))
    return next((one for one in names if one in strategy), None)


def _of_class(how: str, name: str, model: LayeredModel) -> str:
    """Tables that are divided among tensor parallel GPUs are sharded."""
    chain = model.chain
    is_table = name == "embedding" or any(part.layer == name for part in chain.embeddings)
    how = "shard" if is_table and how == "tp" else how
    if how not in HOWS:
        raise StrategyError(f"--strategy {name}={how!r:.30}: known ways: {', '.join(HOWS)}")
    return how

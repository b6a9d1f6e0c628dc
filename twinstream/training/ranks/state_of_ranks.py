"""The state of a run, tensor by whole tensor, as it lies on ranks: in stages, in shards."""

from typing import Any

from twinstream.clusters.executable import sharding_of
from twinstream.clusters.layout import Layout
from twinstream.models.recipe import Recipe
from twinstream.models.spec import ModelSpec
from twinstream.schedule.cluster.projecting import RankPart
from twinstream.training.ranks.lines import Resting


class StateOfRanks:
    """Gives ranks at rest their state, and takes it.

    Attributes:
        names: of all whole tensors, `param.GROUP` and `opt.GROUP`.
    """

    def __init__(
        self, parts: list[RankPart], spec: ModelSpec, recipe: Recipe, layout: Layout
    ) -> None:
        from twinstream.executor.state.sharded_state import ShardedState
        from twinstream.executor.state.training_state import carried_names

        sharding = sharding_of(layout)
        self._shards = None if sharding is None else ShardedState(spec, recipe, sharding)
        self._owners: dict[str, list[tuple[int, int]]] = {}  # rank and replica
        for part in parts:
            for name in carried_names(part.schedule):
                place = part.rank, part.coordinates.get("dp", 0)
                self._owners.setdefault(name, []).append(place)
        self.names = list(self._owners)

    def put(self, ranks: Resting, name: str, flat: Any) -> None:
        """To all who have it, 1-D uint8."""
        for rank, replica in self._owners[name]:
            own = flat if self._shards is None else self._shards.shard({name: flat}, replica)[name]
            ranks.put(rank, name, own.numpy().data)

    def take(self, ranks: Resting, name: str) -> Any:
        """Of the first replica or, where it is sharded, of all.

        Of tied embeddings, which two stages have, the first stage's: theirs are alike.
        """
        import torch

        def of(rank: int) -> torch.Tensor:
            return torch.frombuffer(bytearray(ranks.take(rank, name)), dtype=torch.uint8)

        owners = {replica: rank for rank, replica in reversed(self._owners[name])}
        if self._shards is None:
            return of(owners[0])
        return self._shards.whole([{name: of(owners[at])} for at in sorted(owners)])[name]

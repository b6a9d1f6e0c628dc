"""Trainings of a small model on ranks, and on one process, to compare."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

import torch

from tests.executor.ranks.one_process import Reference, train_replicas
from twinstream.clusters.pipeline import plan_pipeline
from twinstream.executor.launch.rank_processes import RankProcesses
from twinstream.executor.program.options import RunOptions
from twinstream.executor.ranks.rank_run import RankInputs, RankOutcome
from twinstream.executor.run.training import Training
from twinstream.executor.state.parted_state import RankStates, place_of
from twinstream.executor.state.training_state import State, initial_state
from twinstream.hardware_profiles.loader import load_machine
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.layout import whole_group
from twinstream.models.layouts.job import Job
from twinstream.models.layouts.layout import Layout
from twinstream.models.lowering.lower import lower
from twinstream.models.options import Experts
from twinstream.models.presets import load_preset
from twinstream.models.recipes.recipe import Recipe
from twinstream.schedule.cluster.projecting import RankPart
from twinstream.schedule.cluster.verify import require_safe
from twinstream.schedule.document import Caps, Schedule
from twinstream.schedule.workload import Workload

WORKLOAD = Workload(seq_len=64, chunk_tokens=64, chunks_per_round=2, rounds_per_step=4)
NUM_STEPS = 3


@dataclass(frozen=True)
class Case:
    """What is trained, and how it is laid out."""

    layout: Layout
    recipe: Recipe = field(default_factory=Recipe)
    max_norm: float = 0.0
    caps: Caps | None = None
    preset: str = "tiny"
    dtype: str = "bfloat16"
    experts: Experts | None = None
    heads: int | None = None  # of queries; half as many of keys
    workload: Workload = WORKLOAD  # of a replica, before sequences are cut

    @property
    def spec(self) -> ModelSpec:
        spec = load_preset(self.preset).model_copy(update={"dtype": self.dtype})
        if self.heads is not None:
            heads = {"num_heads": self.heads, "num_kv_heads": self.heads // 2, "head_dim": 16}
            spec = spec.model_copy(update=heads)
        return spec if self.experts is None else spec.model_copy(update={"experts": self.experts})

    @property
    def job(self) -> Job:
        return Job.of_step(self.spec, self.workload, self.recipe, self.layout)

    def training(self, replica: int) -> Training:
        """Chunks are sequences, or slices of them where the layout has some."""
        workload, slices = self.workload, self.job.workload.chunks_per_sequence
        first = replica * workload.chunks_per_round * workload.rounds_per_step

        vocab_size = self.spec.vocab_size

        def tokens(step: int, index: int) -> torch.Tensor:
            sequence, piece = divmod(index, slices)
            generator = torch.Generator().manual_seed(1000 * step + first + sequence)
            shape = (2, workload.chunk_tokens)
            whole = torch.randint(0, vocab_size, shape, generator=generator, dtype=torch.int32)
            return whole.chunk(slices, 1)[piece].contiguous()

        targets = workload.tokens_per_step * self.layout.dp
        return Training(
            tokens, 1e-3, seed=5, num_targets=lambda step: targets, max_norm=self.max_norm
        )

    @property
    def tied(self) -> bool:
        """Whether two stages have the same embedding."""
        return (
            self.spec.tied_embeddings
            and self.layout.pp > 1
            and not self.recipe.freezes("embedding")
        )

    @property
    def rank_states(self) -> RankStates | None:
        return RankStates.of(self.spec, self.recipe, self.layout)

    def state(self) -> State:
        return initial_state(self.spec, 3, self.recipe)


def inputs(case: Case, part: RankPart) -> RankInputs:
    place = place_of(part.coordinates, case.layout.ep)
    work = case.training(place[0]).host_work(part.schedule)
    carried = {item.tensor for item in part.schedule.carried}
    own = {t.parent or t.tensor_id for t in part.schedule.tensors if t.tensor_id in carried}
    whole = set(map(whole_group, own))
    state = {name: flat for name, flat in case.state().items() if name in whole}
    if (states := case.rank_states) is not None:
        state = states.of_rank(state, place)
    return RankInputs(work, {name: flat for name, flat in state.items() if name in own})


def planned_ranks(case: Case) -> Schedule:
    """Proven safe."""
    schedule = plan_pipeline(case.job, load_machine("cpu"), case.caps)
    require_safe(schedule)
    return schedule


def train_ranks(case: Case, processes: RankProcesses) -> list[RankOutcome]:
    schedule = planned_ranks(case)
    options = RunOptions(backend="cpu", num_passes=NUM_STEPS)
    return processes.execute(schedule, partial(inputs, case), options)


def reference(case: Case) -> Reference:
    """The same for all layouts of as many replicas."""
    layout = Layout(dp=case.layout.dp, zero=0, pp=2 if case.tied else 1)
    return _reference(replace(case, layout=layout, caps=None))


@cache
def _reference(case: Case) -> Reference:
    trainings = [case.training(replica) for replica in range(case.layout.dp)]
    chain = lower(case.spec, WORKLOAD, case.recipe)
    return train_replicas(chain, case.state(), trainings, NUM_STEPS, tied_apart=case.tied)


def numbers(outcome: RankOutcome, sink: str) -> list[float]:
    """What a rank's host took, pass after pass."""
    found = sorted((f.pass_number, f.values) for f in outcome.fetched if f.sink == sink)
    return [float(values.view(torch.float32).item()) for _, values in found]


def states(case: Case, outcomes: Sequence[RankOutcome]) -> list[State]:
    """Of each rank, or of each stage, if its ranks have shards or parts."""
    rank_states = case.rank_states
    if rank_states is None:
        return [outcome.state for outcome in outcomes]
    found: list[State] = []
    for stage in range(case.layout.pp):
        own = [o for o in outcomes if o.coordinates["pp"] == stage]
        found.append(
            rank_states.whole({place_of(o.coordinates, case.layout.ep): o.state for o in own})
        )
    return found


def assert_as_reference(case: Case, outcomes: Sequence[RankOutcome]) -> None:
    """Losses, norms and the state of every replica, bit for bit."""
    expected = reference(case)
    found = states(case, outcomes)
    assert {name for state in found for name in state} == expected.state.keys()
    for state in found:
        for name, flat in state.items():
            assert torch.equal(flat, expected.state[name]), name
    for replica, losses in enumerate(expected.losses):
        own = [o for o in outcomes if place_of(o.coordinates, case.layout.ep)[0] == replica]
        assert [numbers(o, "loss") for o in own if numbers(o, "loss")] == [losses]
        assert all(norm > case.max_norm for norm in expected.norms)
        norms = [numbers(o, "grad_norm") for o in own if numbers(o, "grad_norm")]
        assert norms == ([expected.norms] if expected.norms else [])

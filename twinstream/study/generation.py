"""Generating text: a pass over the prompts, then a step for each token, planned and predicted, on
one device or on the ranks of a layout."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

from twinstream.hardware_profiles.clusters.curves import Collective
from twinstream.hardware_profiles.clusters.schema import Cluster
from twinstream.hardware_profiles.collectives.rank_group import RankGroup
from twinstream.hardware_profiles.collectives.timing import collective_time_ns
from twinstream.hardware_profiles.schema import Machine
from twinstream.measures.uncertainty import Uncertainty
from twinstream.models.decoders.rank_share import even_stages, rank_share, table_bytes
from twinstream.models.decoders.spec import ModelSpec
from twinstream.models.layouts.layout import LayoutError
from twinstream.planner.generation import TextGeneration
from twinstream.planner.planner import Planner
from twinstream.planner.request import PlanRequest
from twinstream.schedule.document import Caps
from twinstream.schedule.workload import Workload
from twinstream.simulator.replay import steady_state
from twinstream.study.answer import Answer

_BUSY = 0.6  # of a memory's rate, beyond which it is what kernels wait for
_LOGIT_BYTES = 4
# Of the published rates of generating with one sequence in the source's table: of one device, and
# of several.
_ERRORS = {False: (0.1, 0.197), True: (0.089, 0.197)}
_SOURCE = "docs/benchmarks/generation.csv"


@dataclass(frozen=True)
class GenerationRanks:
    """The GPUs that generate: replicas have sequences of their own, stages follow one another, and
    the ranks of tp share heads, FFN width and vocabulary as in Megatron: two all-reduces a layer,
    one behind the embedding, and a gather of the logits.

    Attributes:
        cluster: None where there is one GPU.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cluster: Cluster | None = None

    @property
    def num_gpus(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def text(self) -> str:
        """The degrees that are not 1."""
        named = {"tp": self.tp, "pp": self.pp, "dp": self.dp}
        return " ".join(f"{name}{count}" for name, count in named.items() if count > 1)

    def parts(self, batch: int) -> int:
        """Return into how many parts a replica's sequences are cut, which follow one another
        through the stages: as many as stages, or the most below that divide them."""
        return next(count for count in range(min(self.pp, batch), 0, -1) if batch % count == 0)

    def tp_s(self, spec: ModelSpec, layers: int, work: Workload, ends: tuple[bool, bool]) -> float:
        """Seconds of a stage's collectives over tp in a pass; nothing runs beside them.

        Args:
            ends: whether the stage embeds, and whether it has the head.
        """
        if self.tp == 1:
            return 0.0
        embeds, has_head = ends
        row_bytes = spec.d_model * spec.itemsize
        rows = work.chunk_tokens // work.seq_len
        summed = self._seconds("all_reduce", work.chunk_tokens * row_bytes, self.tp)
        found = (2 * layers + embeds) * summed
        if has_head:
            found += self._seconds("all_gather", rows * spec.vocab_size * _LOGIT_BYTES, self.tp)
        return work.chunks_per_round * found

    def sent_s(self, spec: ModelSpec, tokens: int) -> float:
        """Seconds in which the hidden state of so many tokens goes through all stages."""
        if self.pp == 1:
            return 0.0
        return (self.pp - 1) * self._seconds(
            "send_recv", tokens * spec.d_model * spec.itemsize, 2, apart=self.tp * self.pp
        )

    def _seconds(self, name: Collective, size_bytes: int, ranks: int, apart: int = 0) -> float:
        """One collective, of ranks of one node as far as there are so many."""
        assert self.cluster is not None, "several GPUs are of a cluster"
        on_node = self.cluster.count("gpus_per_node")
        each = 1 if apart > on_node else min(ranks, on_node)
        group = RankGroup(ranks=ranks, ranks_per_node=each)
        return collective_time_ns(self.cluster, name, size_bytes, group).time_ns / 1e9


@dataclass(frozen=True)
class PlannedPass:
    """A pass, planned for a rank of each stage.

    Attributes:
        answers: by stage.
        tp_s: seconds of collectives over tp beside each, by stage.
        sent_s: seconds between the stages, of a part of the sequences.
        parts: of the sequences, one behind the other in the stages.
        beside_bytes: on the device of the first stage beside its plan.
    """

    answers: tuple[Answer, ...]
    tp_s: tuple[float, ...]
    sent_s: float
    parts: int
    beside_bytes: int = 0

    def through_s(self, stage_s: Sequence[float]) -> float:
        """Return the seconds until all parts are through all stages."""
        each = [seconds / self.parts for seconds in stage_s]
        return sum(each) + self.sent_s + (self.parts - 1) * max(each)

    def again_s(self, stage_s: Sequence[float]) -> float:
        """Return the seconds between two passes of a part: it waits for its own way through all
        stages, or for the slowest stage, which has all parts."""
        return max(sum(stage_s) / self.parts + self.sent_s, max(stage_s))

    @property
    def stage_s(self) -> list[float]:
        """Seconds of each stage for all parts."""
        return [one.step_s + said for one, said in zip(self.answers, self.tp_s, strict=True)]

    @property
    def bounds_s(self) -> list[float] | None:
        """Lower bounds of these; None where there is none."""
        bounds = [one.bound_s for one in self.answers]
        if None in bounds:
            return None
        return [(bound or 0.0) + said for bound, said in zip(bounds, self.tp_s, strict=True)]

    @property
    def slowest(self) -> Answer:
        """The plan of the slowest stage."""
        stages = self.stage_s
        return self.answers[stages.index(max(stages))]

    @property
    def communication_s(self) -> float:
        """Seconds in which a sequence waits for collectives and messages."""
        return sum(self.tp_s) / self.parts + self.sent_s

    @property
    def device_bytes(self) -> int:
        """On the fullest device."""
        first, *others = (one.device_bytes for one in self.answers)
        return max(first + self.beside_bytes, *others, 0)

    @property
    def limits(self) -> tuple[str, ...]:
        """What it hangs on; kernels that wait for the device's memory are limited by it, and what
        takes more than a third of the time are messages."""
        step = self.slowest
        busy = step.timeline.utilization.get("hbm", 0.0)
        compute = "hbm" if busy > _BUSY else "compute"
        found = tuple(compute if one == "compute" else one for one in step.limits)
        is_said = 3 * self.communication_s > self.through_s(self.stage_s)
        return ("communication", *found) if is_said else found


@dataclass(frozen=True)
class PlannedGeneration:
    """The plans of the prompts' pass, and of the first and the last step behind it.

    A step takes longer the fuller the cache is, by as much for each token: the mean of the first
    and the last is that of all.
    """

    generation: TextGeneration
    ranks: GenerationRanks
    request: PlanRequest
    prompts: PlannedPass
    first: PlannedPass
    last: PlannedPass

    @classmethod
    def of(
        cls, generation: TextGeneration, request: PlanRequest, planner: Planner | None = None,
        ranks: GenerationRanks = GenerationRanks(),
    ) -> Self:  # fmt: skip
        """Plan and predict.

        Args:
            request: of a model on a machine within caps; its step has the recipe.
            ranks: of which each has such a machine.

        Raises:
            InfeasiblePlan: the caps are too small; it says what would do.
            TwinstreamError: the model has no such cache, or no positions for so many tokens; or it
                or its sequences cannot be split so.
        """
        planner = planner or Planner(steady_state)
        spec = generation.decoder_of(request)
        if generation.batch % ranks.dp:
            raise LayoutError(
                f"{generation.batch} sequences do not divide among {ranks.dp} replicas: give a "
                "--batch that does, or other degrees"
            )
        own = replace(generation, batch=generation.batch // ranks.dp)
        parts, stages = ranks.parts(own.batch), _Stages.of(spec, ranks)
        planned: dict[tuple[ModelSpec, Caps], list[Answer]] = {}
        by_stage = []
        for one in stages.requests(request):
            alike = planned.get((one.decoder, one.caps))
            by_stage.append(
                alike or [
                    Answer.of_plan(planner.plan(step), step, is_known=False)
                    for step in own.steps(one, parts)
                ]
            )  # fmt: skip
            planned[one.decoder, one.caps] = by_stage[-1]
        passes = [stages.passed(answers, ranks, parts) for answers in zip(*by_stage, strict=True)]
        return cls(generation, ranks, request, *passes)

    @property
    def machine(self) -> Machine:
        return self.request.machine

    @property
    def steps(self) -> tuple[tuple[str, PlannedPass], ...]:
        """The planned passes, each with its name."""
        return ("prompts", self.prompts), ("first token", self.first), ("last token", self.last)

    def pass_s(self, name: str, one: PlannedPass) -> float:
        """Return what a pass adds to the time of a sequence."""
        return (one.through_s if name == "prompts" else one.again_s)(one.stage_s)

    @property
    def first_token_s(self) -> float:
        """Seconds until the first token of all sequences, whose prompts are computed together."""
        return self.prompts.through_s(self.prompts.stage_s)

    @property
    def token_s(self) -> float:
        """Seconds between two tokens of a sequence, on average."""
        return sum(one.again_s(one.stage_s) for one in (self.first, self.last)) / 2

    @property
    def seconds(self) -> float:
        """Seconds of all: the prompts' pass has the first token, a step each further one."""
        return self.first_token_s + (self.generation.decode - 1) * self.token_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens generated a second, the prompts' pass counted in."""
        return self.generation.batch * self.generation.decode / self.seconds

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens generated a second once the prompts are computed."""
        return self.generation.batch / self.token_s

    @property
    def bound_s(self) -> float | None:
        """Seconds that no plan can beat: the lower bounds of its passes, added up."""
        bounds = [one.bounds_s for _, one in self.steps]
        if None in bounds:
            return None
        prompts, first, last = (
            (one.through_s if one is self.prompts else one.again_s)(bound or [])
            for (_, one), bound in zip(self.steps, bounds, strict=True)
        )
        return prompts + (self.generation.decode - 1) * (first + last) / 2

    @property
    def uncertainty(self) -> Uncertainty:
        """How far off the prediction may be: no profile was fitted to steps of a token, and the
        published ones are of other programs' kernels."""
        own = self.first.slowest.uncertainty
        mean, worst = _ERRORS[self.ranks.num_gpus > 1]
        return own.model_copy(
            update={
                "mean": max(own.mean or 0.0, mean), "worst": max(own.worst or 0.0, worst),
                "kind": "published", "source": _SOURCE, "bias": 0.0,
            }
        )  # fmt: skip

    @cached_property
    def cache_bytes(self) -> int:
        """Bytes of the cache when it is full, of the GPU that has the most."""
        return max(_bytes_of("cache", one) for one in self.last.answers)

    @cached_property
    def weights_bytes(self) -> int:
        """Bytes of the parameters, of the GPU that has the most."""
        first, *others = (_bytes_of("param", one) for one in self.last.answers)
        return max(first + self.last.beside_bytes, *others, 0)

    @property
    def figures(self) -> dict[str, Any]:
        """All figures, by the names that JSON and CSV have."""
        bound = self.bound_s
        layout: Mapping[str, Any] = {}
        if self.ranks.num_gpus > 1:
            communication = {name: one.communication_s for name, one in self.steps}
            layout = {
                "layout_text": self.ranks.text, "gpus": self.ranks.num_gpus,
                "communication_s": communication,
            }  # fmt: skip
        return {
            **layout,
            "first_token_s": self.first_token_s,
            "token_s": self.token_s,
            "decode_tokens_per_s": self.decode_tokens_per_s,
            "tokens_per_s": self.tokens_per_s,
            "seconds": self.seconds,
            "bound_s": bound,
            "gap": None if not bound else self.seconds / bound - 1,
            "weights_bytes": self.weights_bytes,
            "cache_bytes": self.cache_bytes,
            "device_peak_bytes": max(one.device_bytes for _, one in self.steps),
            "host_peak_bytes": max(
                answer.host_bytes for _, one in self.steps for answer in one.answers
            ),
            "limits": {name: list(one.limits) for name, one in self.steps},
            "expected_error_mean": self.uncertainty.symmetric,
            "expected_error_kind": self.uncertainty.kind,
        }

    def records(self) -> list[dict[str, object]]:
        """Return one row, with all figures."""
        return [dict(self.figures)]


@dataclass(frozen=True)
class _Stages:
    """What a rank of each stage has of a model."""

    spec: ModelSpec
    shares: tuple[ModelSpec, ...]
    beside_bytes: int

    @classmethod
    def of(cls, spec: ModelSpec, ranks: GenerationRanks) -> Self:
        last = ranks.pp - 1
        shares = tuple(
            rank_share(spec, ranks.tp, layers, embeds=stage == 0, has_head=stage == last)
            for stage, layers in enumerate(even_stages(spec, ranks.pp))
        )
        return cls(spec, shares, table_bytes(spec, ranks.tp) if last else 0)

    def requests(self, request: PlanRequest) -> list[PlanRequest]:
        """Return those of each stage; the first one's embedding takes of its cap."""
        found = [replace(request, spec=share) for share in self.shares]
        caps = request.caps
        if self.beside_bytes and caps.device_bytes is not None:
            room = max(1, caps.device_bytes - self.beside_bytes)
            found[0] = replace(found[0], caps=caps.model_copy(update={"device_bytes": room}))
        return found

    def passed(
        self, answers: Sequence[Answer], ranks: GenerationRanks, parts: int
    ) -> PlannedPass:  # fmt: skip
        last, works = len(answers) - 1, [answer.schedule.workload for answer in answers]
        tp_s = tuple(
            ranks.tp_s(self.spec, share.num_layers, work, (stage == 0, stage == last))
            for stage, (share, work) in enumerate(zip(self.shares, works, strict=True))
        )
        sent_s = ranks.sent_s(self.spec, works[0].tokens_per_step // parts)
        return PlannedPass(tuple(answers), tp_s, sent_s, parts, self.beside_bytes)


def _bytes_of(kind: str, answer: Answer) -> int:
    return sum(
        tensor.size_bytes
        for tensor in answer.schedule.only.tensors
        if tensor.parent is None and tensor.tensor_id.startswith(f"{kind}.")
    )

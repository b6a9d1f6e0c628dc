"""Generating text: a pass over the prompts, then a step for each token, planned and predicted."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from twinstream.hardware_profiles.schema import Machine
from twinstream.measures.uncertainty import Uncertainty
from twinstream.models.providers.model import AnyModel
from twinstream.planner.generation import TextGeneration
from twinstream.planner.planner import Planner
from twinstream.planner.request import PlanRequest
from twinstream.simulator.replay import steady_state
from twinstream.study.answer import Answer

_BUSY = 0.6  # of a memory's rate, beyond which it is what kernels wait for
# Of the 11 published rates of generating with one sequence in the source's table.
_MEAN_ERROR, _WORST_ERROR, _SOURCE = 0.1, 0.197, "docs/benchmarks/generation.csv"


@dataclass(frozen=True)
class PlannedGeneration:
    """The plans of the prompts' pass, and of the first and the last step behind it.

    A step takes longer the fuller the cache is, by as much for each token: the mean of the first
    and the last is that of all.
    """

    generation: TextGeneration
    prompts: Answer
    first: Answer
    last: Answer

    @classmethod
    def of(
        cls, generation: TextGeneration, request: PlanRequest, planner: Planner | None = None
    ) -> "PlannedGeneration":
        """Plan and predict.

        Args:
            request: of a model on a machine within caps; its step has the recipe.

        Raises:
            InfeasiblePlan: the caps are too small; it says what would do.
            TwinstreamError: the model has no such cache, or no positions for so many tokens.
        """
        planner = planner or Planner(steady_state)
        found = [
            Answer.of_plan(planner.plan(one), one, is_known=False)
            for one in generation.steps(request)
        ]
        return cls(generation, *found)

    @property
    def machine(self) -> Machine:
        return self.prompts.machine

    @property
    def model(self) -> AnyModel:
        return self.prompts.asked.spec

    @property
    def steps(self) -> tuple[tuple[str, Answer], ...]:
        """The planned passes, each with its name."""
        return ("prompts", self.prompts), ("first token", self.first), ("last token", self.last)

    @property
    def limits(self) -> dict[str, tuple[str, ...]]:
        """What each pass hangs on; kernels that wait for the device's memory are limited by it."""
        found = {}
        for name, step in self.steps:
            busy = step.timeline.utilization.get("hbm", 0.0)
            compute = "hbm" if busy > _BUSY else "compute"
            found[name] = tuple(compute if one == "compute" else one for one in step.limits)
        return found

    @property
    def first_token_s(self) -> float:
        """Seconds until the first token of all sequences, whose prompts are computed together."""
        return self.prompts.step_s

    @property
    def token_s(self) -> float:
        """Seconds between two tokens of a sequence, on average."""
        return (self.first.step_s + self.last.step_s) / 2

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
        bounds = [step.bound_s for _, step in self.steps]
        if None in bounds:
            return None
        prompts, first, last = (bound or 0.0 for bound in bounds)
        return prompts + (self.generation.decode - 1) * (first + last) / 2

    @property
    def uncertainty(self) -> Uncertainty:
        """How far off the prediction may be: no profile was fitted to steps of a token, and the
        published ones are of other programs' kernels."""
        own = self.first.uncertainty
        return own.model_copy(
            update={
                "mean": max(own.mean or 0.0, _MEAN_ERROR),
                "worst": max(own.worst or 0.0, _WORST_ERROR),
                "kind": "published", "source": _SOURCE, "bias": 0.0,
            }
        )  # fmt: skip

    @cached_property
    def cache_bytes(self) -> int:
        """Bytes of the cache when it is full."""
        return self._bytes_of("cache")

    @cached_property
    def weights_bytes(self) -> int:
        """Bytes of the parameters."""
        return self._bytes_of("param")

    def _bytes_of(self, kind: str) -> int:
        return sum(
            tensor.size_bytes
            for tensor in self.last.schedule.only.tensors
            if tensor.parent is None and tensor.tensor_id.startswith(f"{kind}.")
        )

    @property
    def figures(self) -> dict[str, Any]:
        """All figures, by the names that JSON and CSV have."""
        bound = self.bound_s
        return {
            "first_token_s": self.first_token_s,
            "token_s": self.token_s,
            "decode_tokens_per_s": self.decode_tokens_per_s,
            "tokens_per_s": self.tokens_per_s,
            "seconds": self.seconds,
            "bound_s": bound,
            "gap": None if not bound else self.seconds / bound - 1,
            "weights_bytes": self.weights_bytes,
            "cache_bytes": self.cache_bytes,
            "device_peak_bytes": max(step.device_bytes for _, step in self.steps),
            "host_peak_bytes": max(step.host_bytes for _, step in self.steps),
            "limits": {name: list(limits) for name, limits in self.limits.items()},
            "expected_error_mean": self.uncertainty.symmetric,
            "expected_error_kind": self.uncertainty.kind,
        }

    def records(self) -> list[dict[str, object]]:
        """Return one row, with all figures."""
        return [dict(self.figures)]

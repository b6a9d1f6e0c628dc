"""What a campaign has found so far: one document, kept after every job."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt

from benchmarks.gpu.jobs.campaign import Backend, Size
from twinstream.executor.probe.chosen import Chosen
from twinstream.executor.run.device_state import DeviceState
from twinstream.models.recipes.recipe import KernelChoice
from twinstream.schedule.node import Node


class Where(Node):
    """The device that measured, and with what; figures of two devices are never mixed."""

    backend: Backend
    device: str
    driver: str
    torch: str
    commit: str
    date: str
    command: str


class FactsFound(Node):
    """What there is to know of the machine before anything is measured, by name."""

    kind: Literal["facts"] = "facts"
    facts: dict[str, str]


class SuiteFound(Node):
    """Outcome of tests marked gpu: so far, where some were not reached in time.

    `reached` are not run again. `in_flight` is the one that was running when time was up.
    """

    kind: Literal["tests"] = "tests"
    passed: NonNegativeInt = 0
    failed: NonNegativeInt = 0
    skipped: NonNegativeInt = 0
    failures: tuple[str, ...] = ()
    reached: tuple[str, ...] = ()
    in_flight: str = ""
    complete: bool = True


class KernelsFound(Chosen):
    """The kernels that were chosen for the device."""

    kind: Literal["kernels"] = "kernels"


class LinkRate(Node):
    """One size of one direction of pinned copies, GB/s."""

    direction: str
    size_bytes: NonNegativeInt
    gb_per_s: float


class AttentionChecked(Node):
    """An attention on one shape: the same bits twice, its error, ns of a call, and its rate.

    The error is the largest difference from eager attention in float32 over the largest value. The
    rate counts what is under the causal mask. `refused` says why there is nothing.
    """

    name: str
    seq_len: NonNegativeInt
    num_sequences: NonNegativeInt
    head_dim: NonNegativeInt
    refused: str = ""
    same_bits: bool | None = None
    error: float | None = None
    forward_ns: float | None = None
    backward_ns: float | None = None
    backward_flop_per_s: float | None = None


class CheckFound(Node):
    """Links, or why they have no figures, and attention in slices beside the same called whole."""

    kind: Literal["check"] = "check"
    links: tuple[LinkRate, ...] = ()
    unsteady: str = ""
    attention: tuple[AttentionChecked, ...] = ()


class SampleRatio(Node):
    """A probed kernel: measured ns, over what the fitted curves say, and at what clock."""

    name: str
    time_ns: float
    ratio: float
    state: DeviceState | None = None


class ProbeFound(Node):
    """What the profile was fitted to; the profile itself is a file beside."""

    kind: Literal["probe"] = "probe"
    machine: str
    content_hash: str
    kernels: KernelChoice
    links: tuple[LinkRate, ...] = ()
    samples: tuple[SampleRatio, ...] = ()
    sustained_flop_per_s: float | None = None
    sustained: DeviceState | None = None


class KindTime(Node):
    """Busy time of a kind of op in the longest short pass, ns: predicted, measured, its floor.

    The floor is the time of its FLOPs at the best matrix rate probed, or of its bytes at the
    probed rate of HBM or the link, whichever is longer, work by work.
    """

    name: str
    num_ops: NonNegativeInt
    predicted_ns: float
    measured_ns: float
    floor_ns: float


class CellFound(Node):
    """A benchmark cell, predicted and measured.

    Times are of a step of `tokens_per_step`. `extended_step_s` is extended from passes of
    `rounds_measured` rounds: the longer adds so many rounds to the shorter, and the step adds
    the rest at the same time each. It is None where the longer took no longer, and the step itself
    is run. `extended_spread_s` is its standard deviation, None of too few passes to have one.
    `states` are the device's, of each pass of both, in order.
    """

    kind: Literal["cell"] = "cell"
    tokens_per_step: NonNegativeInt
    workload: str
    policy: str
    machine: str
    predicted_step_s: float
    predicted_extended_s: float
    bound_step_s: float
    extended_step_s: float | None = None
    extended_spread_s: float | None = None
    rounds_measured: tuple[int, int]
    short_steps_s: tuple[float, float]
    model_flops: NonNegativeInt
    executed_flops: NonNegativeInt
    peak_flop_per_s: float
    device_cap_bytes: NonNegativeInt | None = None
    device_used_bytes: NonNegativeInt | None = None
    host_arena_bytes: NonNegativeInt
    host_ns_per_op: float | None = None
    losses: tuple[float, ...]
    kinds: tuple[KindTime, ...]
    states: tuple[DeviceState | None, ...] = ()


class WholeFound(Node):
    """A whole step of a cell, measured."""

    kind: Literal["whole"] = "whole"
    step_s: float
    losses: tuple[float, ...]
    states: tuple[DeviceState | None, ...] = ()


class TrainFound(Node):
    """A short `twinstream train`: losses of its steps and evaluations, its last checkpoint."""

    kind: Literal["train"] = "train"
    losses: tuple[float, ...]
    eval_losses: tuple[float, ...]
    tokens_per_s: float
    predicted_tokens_per_s: float | None = None
    checkpoint_bytes: NonNegativeInt
    checkpoint_s: float


class PeerFound(Node):
    """A peer: a step of `tokens_per_step` from its micro-batches and one update."""

    kind: Literal["peer"] = "peer"
    tokens_per_step: NonNegativeInt
    step_s: float
    micro_batch_s: float
    update_s: float
    loss: float
    device_used_bytes: NonNegativeInt | None = None


Found = Annotated[
    FactsFound
    | CheckFound
    | SuiteFound
    | KernelsFound
    | ProbeFound
    | TrainFound
    | CellFound
    | WholeFound
    | PeerFound,
    Field(discriminator="kind"),
]


class Outcome(Node):
    """One job: done with what it found, partly so, or skipped or failed with the reason.

    `attempts` counts starts, so that a job that took the process down is not tried for ever.
    """

    status: Literal["started", "part", "done", "skipped", "failed"]
    attempts: NonNegativeInt = 0
    seconds: float = 0.0
    reason: str = ""
    found: Found | None = None


class Results(Node):
    """Outcomes by job key, in the order they came."""

    schema_version: Literal[1] = 1
    where: Where
    size: Size
    outcomes: dict[str, Outcome] = Field(default_factory=dict)

    def with_outcome(self, key: str, outcome: Outcome) -> "Results":
        return self.model_copy(update={"outcomes": {**self.outcomes, key: outcome}})

    def attempts(self, key: str) -> int:
        found = self.outcomes.get(key)
        return found.attempts if found else 0

    def found(self, key: str) -> Found | None:
        outcome = self.outcomes.get(key)
        return outcome.found if outcome else None

    def is_done(self, key: str) -> bool:
        found = self.outcomes.get(key)
        return found is not None and found.status in ("done", "skipped")

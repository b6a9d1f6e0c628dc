"""What a campaign has found so far: one document, kept after every job."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt

from twinstream.models.recipe import KernelChoice
from twinstream.schedule.node import Node


class Where(Node):
    """The device that measured, and with what; figures of two devices are never mixed."""

    backend: Literal["cpu", "cuda"]
    device: str
    driver: str
    torch: str
    commit: str
    date: str
    command: str


class SuiteFound(Node):
    """Outcome of the tests marked gpu."""

    kind: Literal["tests"] = "tests"
    passed: NonNegativeInt
    failed: NonNegativeInt
    skipped: NonNegativeInt
    failures: tuple[str, ...] = ()


class KernelsFound(Node):
    """The kernels that are right and fastest on the device, and what there is to say of others.

    `excess_bytes` of device memory are what they take beyond what plans count with.
    """

    kind: Literal["kernels"] = "kernels"
    kernels: KernelChoice
    notes: tuple[str, ...] = ()
    excess_bytes: NonNegativeInt = 0


class LinkRate(Node):
    """One size of one direction of pinned copies, GB/s."""

    direction: str
    size_bytes: NonNegativeInt
    gb_per_s: float


class SampleRatio(Node):
    """A probed kernel: measured ns, and measured over what the fitted curves say."""

    name: str
    time_ns: float
    ratio: float


class ProbeFound(Node):
    """What the profile was fitted to; the profile itself is a file beside."""

    kind: Literal["probe"] = "probe"
    machine: str
    content_hash: str
    kernels: KernelChoice
    links: tuple[LinkRate, ...] = ()
    samples: tuple[SampleRatio, ...] = ()


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

    Times are of a step of `tokens_per_step`. `measured_step_s` is extended from passes of
    `rounds_measured` rounds: the longer adds so many rounds to the shorter, and the step adds
    the rest at the same time each. `whole_step_s` is a whole step, where that was run too.
    """

    kind: Literal["cell"] = "cell"
    tokens_per_step: NonNegativeInt
    workload: str
    policy: str
    machine: str
    predicted_step_s: float
    predicted_extended_s: float
    bound_step_s: float
    measured_step_s: float
    whole_step_s: float | None = None
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
    SuiteFound | KernelsFound | ProbeFound | CellFound | PeerFound, Field(discriminator="kind")
]


class Outcome(Node):
    """One job: done with what it found, or skipped or failed with the reason.

    `attempts` counts starts, so that a job that took the process down is not tried for ever.
    """

    status: Literal["started", "done", "skipped", "failed"]
    attempts: NonNegativeInt = 0
    seconds: float = 0.0
    reason: str = ""
    found: Found | None = None


class Results(Node):
    """Outcomes by job key, in the order they came."""

    schema_version: Literal[1] = 1
    where: Where
    size: Literal["full", "tiny"]
    outcomes: dict[str, Outcome] = Field(default_factory=dict)

    def with_outcome(self, key: str, outcome: Outcome) -> "Results":
        return self.model_copy(update={"outcomes": {**self.outcomes, key: outcome}})

    def attempts(self, key: str) -> int:
        found = self.outcomes.get(key)
        return found.attempts if found else 0

    def is_done(self, key: str) -> bool:
        found = self.outcomes.get(key)
        return found is not None and found.status in ("done", "skipped")

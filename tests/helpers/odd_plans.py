"""Random small steps on machines with odd links, and random choices that a user fixes."""

from dataclasses import dataclass
from random import Random

from tests.helpers.planning import plan_step
from tests.helpers.tiny_chains import small
from twinstream.hardware_profiles.loader import load_machine, override
from twinstream.hardware_profiles.schema import Machine
from twinstream.models.spec import ModelSpec
from twinstream.planner.choices import Choices
from twinstream.planner.request import TrainingStep
from twinstream.schedule.document import Caps, RankSchedule
from twinstream.simulator.replay import simulate_rank

_KIB = 1024
_KINDS = ("parameter", "gradient", "optimizer_state", "activation")


@dataclass(frozen=True)
class OddPlan:
    """What to plan, with whatever of it is fixed."""

    spec: ModelSpec
    step: TrainingStep
    machine: Machine
    caps: Caps
    choices: Choices

    @staticmethod
    def of(seed: int) -> "OddPlan":
        random = Random(seed)
        chunk = random.choice((16, 32, 64))
        slices = random.choice((1, 1, 2, 3))
        chunks = slices * random.choice((1, 2, 3, 4))
        rounds = random.choice((1, 2, 3, 5))
        spec = small(
            random.choice(("tiny", "tiny-qwen3")),
            num_layers=random.randint(1, 3),
            d_ff=random.choice((32, 48, 80)),
        )
        step = TrainingStep(
            seq_len=chunk * slices,
            tokens_per_step=chunk * chunks * rounds,
            chunk_tokens=chunk,
            chunks_per_round=chunks,
        )
        return OddPlan(spec, step, _odd_machine(random), _odd_caps(random), _odd_choices(random))

    def planned(self) -> RankSchedule:
        return plan_step(self.spec, self.step, self.machine, self.caps, "optimal", self.choices)

    def step_s(self, schedule: RankSchedule) -> float:
        return simulate_rank(schedule, self.machine).step_ns / 1e9


def _odd_machine(random: Random) -> Machine:
    h2d = 10 ** random.uniform(7, 10.5)
    d2h = h2d * random.choice((1.0, 0.5, 2.0))
    both = random.choice((h2d + d2h, max(h2d, d2h)))
    link = {"pcie_h2d_bytes_per_s": h2d, "pcie_d2h_bytes_per_s": d2h}
    return override(load_machine("cpu"), link | {"pcie_duplex_bytes_per_s": both})


def _odd_caps(random: Random) -> Caps:
    device = None if random.random() < 0.3 else random.randint(300, 2500) * _KIB
    host = None if random.random() < 0.6 else random.randint(300, 3000) * _KIB
    return Caps(device_bytes=device, host_bytes=host)


def _odd_choices(random: Random) -> Choices:
    fixed = random.sample(_KINDS, random.randint(1, 3))
    return Choices(
        homes={kind: random.choice(("host", "host", "device")) for kind in fixed},
        recompute=random.choice((None, None, None, "INPUT", "ATTENTION", "none")),
        prefetch_blocks=random.choice((None, None, 0.0, 1.0, 4.0)),
        effort=random.choice(("normal", "quick", "quick", "quick")),
    )

"""Changes of a rank's schedule that make it wrong, and how the proof judges random damages."""

from collections import Counter
from collections.abc import Callable
from random import Random

from tests.schedule.cluster.damages import DAMAGES
from tests.schedule.cluster.oracle import Cache, problems
from twinstream.clusters.conforms import conforms
from twinstream.schedule.cluster.verify import verify
from twinstream.schedule.document import RankSchedule, Schedule
from twinstream.schedule.ops import Communicate

Change = Callable[[RankSchedule], RankSchedule]


def changed(part: RankSchedule, wanted: str, **update: object) -> RankSchedule:
    at = next(i for i, op in enumerate(part.ops) if op.op_id == wanted)
    ops = list(part.ops)
    ops[at] = ops[at].model_copy(update=update)
    return part.model_copy(update={"ops": tuple(ops)})


def communication(part: RankSchedule, named: str) -> Communicate:
    return next(op for op in part.ops if isinstance(op, Communicate) and named in op.op_id)


def dropped(named: str) -> Change:
    def change(part: RankSchedule) -> RankSchedule:
        gone = communication(part, named)
        kept = [op for op in part.ops if op is not gone]
        kept = [
            op.model_copy(update={"waits": tuple(w for w in op.waits if w != gone.op_id)})
            for op in kept
        ]
        return part.model_copy(update={"ops": tuple(kept)})

    return change


def said(named: str, **update: object) -> Change:
    def change(part: RankSchedule) -> RankSchedule:
        return changed(part, communication(part, named).op_id, **update)

    return change


def of_other_tensor(named: str, old: str, new: str) -> Change:
    def change(part: RankSchedule) -> RankSchedule:
        op = communication(part, named)
        slots = {o.tensor: o.slot for one in part.ops for o in getattr(one, "operands", ())}
        operands = tuple(
            o.model_copy(update={"tensor": new, "slot": slots[new]}) if o.tensor == old else o
            for o in op.operands
        )
        return changed(part, op.op_id, operands=operands)

    return change


def attribute(named: str, **told: object) -> Change:
    def change(part: RankSchedule) -> RankSchedule:
        name, call = next((n, c) for n, c in part.calls.items() if n.startswith(named))
        attributes = {**call.attributes, **told}
        changed = call.model_copy(update={"attributes": attributes})
        return part.model_copy(update={"calls": {**part.calls, name: changed}})

    return change


def assert_seen(document: Schedule, change: Change) -> None:
    """What a change makes of the first stage is refused."""
    before = document.schedules["stage 0"]
    after = change(before)
    assert after != before
    damaged = document.model_copy(update={"schedules": {"stage 0": after}})
    assert verify(damaged) or conforms(damaged)


def judged(base: Schedule, seeds: range) -> tuple[Counter[str], Counter[str]]:
    """How often each damage was tried; and accepted by the proof though brute force, which runs
    every rank, has something against it."""
    tried, wrongly = Counter[str](), Counter[str]()
    assert problems(base, Random(0), Cache()) == set()
    for seed in seeds:
        for name, damage in DAMAGES.items():
            damaged = damage(base, Random(f"{seed} {name}"))
            if damaged is None:
                continue
            tried[name] += 1
            if bool(problems(damaged, Random(seed), Cache())) and not verify(damaged):
                wrongly[name] += 1
    return tried, wrongly

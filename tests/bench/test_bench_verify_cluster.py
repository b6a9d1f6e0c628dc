"""Speed of `verify` on a pipeline of 16 stages of 8,192 ranks each.

pytest tests/bench/test_bench_verify_cluster.py -m bench -s
"""

import time
from collections.abc import Callable

import pytest

from tests.helpers.sketches import tensor
from tests.schedule.cluster.small_clusters import LABEL, cluster_of, mesh_of, schedule_of
from twinstream.schedule.cluster.verify import verify
from twinstream.schedule.cluster.violations import Deadlock, OrderWrong
from twinstream.schedule.document import RankClass, Schedule
from twinstream.schedule.ops import Communicate, Compute, Copy, Mode, Op, Operand, Stream
from twinstream.schedule.proof.verify import verify_rank
from twinstream.schedule.tensors import DEVICE, HOST, Slot

STAGES, LAYERS, ROUNDS = 16, 6, 230
MESH = mesh_of(pp=STAGES, dp=1024, tp=8)
BYTES = 256
ON_DEVICE = ("w", "v", "x0", "x1", "dx0", "dx1", "h0", "h1")
TENSORS = tuple(tensor(name, BYTES) for name in ON_DEVICE)
SLOTS = (
    Slot(slot_id="host.w", tier=HOST, offset_bytes=0, size_bytes=BYTES),
    *(
        Slot(slot_id=name, tier=DEVICE, offset_bytes=BYTES * i, size_bytes=BYTES)
        for i, name in enumerate(ON_DEVICE)
    ),
)


class Stage:
    """The ops of a stage: weights streamed in, a layer, every other one an all_reduce over tp."""

    def __init__(self, stage: int) -> None:
        self.name = f"stage{stage}"
        self.stage = stage
        self.ops: list[Op] = []
        self.counts: dict[tuple[str, str], int] = {}
        self.versions = dict.fromkeys(ON_DEVICE, 0)

    def operand(self, name: str, mode: Mode) -> Operand:
        version = self.versions[name] + (mode == "write")
        self.versions[name] = version + (mode == "update")
        return Operand(name=name, tensor=name, version=version, mode=mode, slot=name)

    def load(self, slot: str) -> None:
        self.ops.append(
            Copy(
                op_id=f"load{len(self.ops)}", stream=Stream(queue="h2d"), tensor="w", version=0,
                source="host.w", destination=slot,
            )
        )  # fmt: skip

    def compute(self, *operands: Operand) -> None:
        op_id = f"compute{len(self.ops)}"
        self.ops.append(
            Compute(
                op_id=op_id, stream=Stream(queue="compute"), task=op_id, call="call",
                operands=operands, label=LABEL,
            )
        )  # fmt: skip

    def say(self, op_id: str, kind: str, axis: str, operand: Operand, shift: int = 0) -> None:
        queue = f"{kind} {operand.tensor[:-1]}" if shift else axis
        number = self.counts.get((kind, queue), 0)
        self.counts[kind, queue] = number + 1
        self.ops.append(
            Communicate.model_validate({
                "op_id": op_id, "stream": Stream(queue=queue), "collective": kind,
                "axes": (axis,), "shift": shift, "sequence": number, "operands": (operand,),
                "label": LABEL,
            })
        )  # fmt: skip

    def layers(self, name: str, source: str | None, target: str | None) -> list[str]:
        """From what has come in to what goes out; returns the all_reduces."""
        said = []
        for layer in range(LAYERS):
            result, weights = f"h{layer % 2}", "wv"[layer % 2]
            self.load(weights)
            taken = [source] if source is not None else []
            operands = [self.operand(t, "read") for t in taken]
            held = Operand(name="w", tensor="w", version=0, mode="read", slot=weights)
            self.compute(held, *operands, self.operand(result, "write"))
            if layer % 2:
                said.append(f"sum{name}.{layer}")
                self.say(said[-1], "all_reduce", "tp", self.operand(result, "update"))
            source = result
        if target is not None and source is not None:
            self.compute(self.operand(source, "read"), self.operand(target, "write"))
        return said


def pipeline() -> Schedule:
    """Rounds forward and backward by turns."""
    stages = [Stage(i) for i in range(STAGES)]
    order: list[list[tuple[str, str]]] = []
    for number in range(ROUNDS):
        for kind, step in (("x", 1), ("dx", -1)):
            along = stages[::step]
            for place, one in enumerate(along):
                name, source, target = f"{kind}.{number}", None, None
                if place:
                    source = f"{kind}{place % 2}"
                    one.say(f"take{name}", "recv", "pp", one.operand(source, "write"), -step)
                    order.append(
                        [(along[place - 1].name, f"give{name}"), (one.name, f"take{name}")]
                    )
                if place + 1 < STAGES:
                    target = f"{kind}{(place + 1) % 2}"
                order += [[(one.name, said)] for said in one.layers(name, source, target)]
                if target is not None:
                    one.say(f"give{name}", "send", "pp", one.operand(target, "read"), step)
    schedules = {one.name: schedule_of(one.ops, TENSORS, SLOTS) for one in stages}
    classes = [
        RankClass(name=one.name, schedule=one.name, cells={"pp": (one.stage,)}) for one in stages
    ]
    return cluster_of(MESH, classes, schedules, order)


def fastest(run: Callable[[], object], repeats: int = 5) -> float:
    """CPU seconds of the fastest of some runs: other work only ever adds."""
    taken = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        taken.append(time.process_time() - start)
    return min(taken)


@pytest.mark.bench
def test_bench_verify_cluster() -> None:
    document = pipeline()
    num_ops = sum(len(one.ops) for one in document.schedules.values())
    assert num_ops >= 130_000 and document.mesh.size == 131_072
    whole = fastest(lambda: verify(document))
    alone = fastest(lambda: [verify_rank(one) for one in document.schedules.values()])
    print(f"\nverify, {num_ops:,} ops, {STAGES} classes, {len(document.order):,} exchanges:")
    print(f"{whole:.2f} s of CPU, of which {alone:.2f} s verify the schedules of the classes")
    assert verify(document) == []
    # Its answer is worth something: stage 14 gives its last x only for the dx that comes of it.
    found = verify(answer_first(document, "stage14"))
    assert [type(violation) for violation in found] == [Deadlock, OrderWrong]
    assert {"givex.229", "takedx.229"} <= set(found[0].ops)


def answer_first(document: Schedule, name: str) -> Schedule:
    ops = list(document.schedules[name].ops)
    place = {op.op_id: i for i, op in enumerate(ops)}
    answer, gift = place[f"takedx.{ROUNDS - 1}"], place[f"givex.{ROUNDS - 1}"]
    late = ops.pop(answer)
    waits = (*ops[gift].waits, late.op_id)
    ops[gift : gift + 1] = [late, ops[gift].model_copy(update={"waits": waits})]
    schedule = document.schedules[name].model_copy(update={"ops": tuple(ops)})
    return document.model_copy(update={"schedules": {**document.schedules, name: schedule}})

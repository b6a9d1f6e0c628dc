"""Each rule of `conforms`, broken once on purpose in a small schedule."""

import pytest

from tests.helpers.sketches import tensor
from tests.schedule.small import (
    CALL,
    CHAIN,
    HEAD,
    REMAKE,
    SCHEDULE,
    STEP,
    TENSORS,
    compute,
    with_op,
    with_operand,
    with_tensor,
    without,
)
from tests.schedule.test_verify import CASES as VERIFY_CASES
from twinstream.schedule.chain import Chain
from twinstream.schedule.cluster.violations import ClusterViolation
from twinstream.schedule.cost import Work
from twinstream.schedule.document import RankSchedule
from twinstream.schedule.ops import Communicate, Label, Op, Stream
from twinstream.schedule.proof.conforms import conforms, require_conforming
from twinstream.schedule.proof.violations import (
    CallDiffers,
    CarriedNotPersistent,
    ConsumedDiffers,
    DiskMisused,
    InputsDiffer,
    OperandsDiffer,
    PersistentNotCarried,
    StreamsDiffer,
    TaskMissing,
    TaskUnexpected,
    TensorDiffers,
    UnsafeSchedule,
    Violation,
    WorkDiffers,
)
from twinstream.schedule.tensors import Carried


def computing(*ops: Op) -> RankSchedule:
    """SCHEDULE with these compute ops and its feed and fetch."""
    host = [op for op in SCHEDULE.ops if op.kind in ("feed", "fetch")]
    return SCHEDULE.model_copy(update={"ops": (*host, *ops)})


STEP_OP, HEAD_OP = compute("step", STEP), compute("head", HEAD)
REMAKE_OP, OTHER_OP = compute("remake", REMAKE), compute("remake-other", REMAKE)
OTHER_CALL = CALL.model_copy(update={"attributes": {"causal": False}})

CASES: dict[str, tuple[RankSchedule, Violation]] = {
    "a tensor of another size": (
        with_tensor("loss", size_bytes=8),
        TensorDiffers("tensor 'loss' is not declared as in the chain", tensor="loss"),
    ),
    "a tensor that is not declared": (
        SCHEDULE.model_copy(update={"tensors": TENSORS[1:]}),
        TensorDiffers("tensor 'weight' is not declared as in the chain", tensor="weight"),
    ),
    "a tensor that the chain does not know": (
        SCHEDULE.model_copy(update={"tensors": (*TENSORS, tensor("new", 8))}),
        TensorDiffers("tensor 'new' is not in the chain", tensor="new"),
    ),
    "a kernel with other attributes": (
        SCHEDULE.model_copy(update={"calls": {"call": OTHER_CALL}}),
        CallDiffers("call 'call' is not the chain's"),
    ),
    "a call that the chain does not know": (
        SCHEDULE.model_copy(update={"calls": {"call": CALL, "new": CALL}}),
        CallDiffers("call 'new' is not the chain's"),
    ),
    "another call": (
        with_op("op-step", call="other"),
        CallDiffers("op 'op-step' calls 'other', task 'step' calls 'call'", ("op-step",)),
    ),
    "a task on another stream": (
        with_op("op-head", stream=Stream(queue="compute2")),
        StreamsDiffer(
            "the device computes on 2 streams: op 'op-step' on 0:compute, op 'op-head' on "
            "0:compute2",
            ("op-step", "op-head"),
        ),
    ),
    "more FLOPs than the model's": (
        SCHEDULE.model_copy(update={"model_flops": 2000}),
        WorkDiffers("model_flops is 2,000, the chain's is 2"),
    ),
    "a dropped task": (
        without("op-step"),
        TaskMissing("task 'step' is not carried out before op 'op-head'", ("op-head",)),
    ),
    "a dropped last task": (
        without("op-head"),
        TaskMissing("task 'head' is not carried out at the end"),
    ),
    "a task twice": (
        computing(STEP_OP, STEP_OP.model_copy(update={"op_id": "again"}), HEAD_OP),
        TaskUnexpected("op 'again' carries out task 'step' again or after a later one", ("again",)),
    ),
    "a task too late": (
        computing(HEAD_OP, STEP_OP),
        TaskUnexpected(
            "op 'op-step' carries out task 'step' again or after a later one", ("op-step",)
        ),
    ),
    "a task of another chain": (
        with_op("op-step", task="dance"),
        TaskUnexpected(
            "op 'op-step' carries out 'dance', which is no task of the chain", ("op-step",)
        ),
    ),
    "a recompute too early": (
        computing(REMAKE_OP, STEP_OP, HEAD_OP),
        TaskUnexpected(
            "op 'op-remake' carries out recompute 'remake', but not right before task 'head'",
            ("op-remake",),
        ),
    ),
    "a recompute too late": (
        computing(STEP_OP, HEAD_OP, REMAKE_OP),
        TaskUnexpected(
            "op 'op-remake' carries out recompute 'remake', but not right before task 'head'",
            ("op-remake",),
        ),
    ),
    "two recomputes of a group": (
        computing(STEP_OP, REMAKE_OP, OTHER_OP, HEAD_OP),
        TaskUnexpected(
            "op 'op-remake-other' carries out recompute 'remake-other', though one of group "
            "'hidden' has run",
            ("op-remake-other",),
        ),
    ),
    "another version": (
        with_operand("op-step", 1, version=1),
        OperandsDiffer(
            "op 'op-step' has operand 'weight' (update version 1 of 'weight') in slot "
            "'device.weight', where task 'step' has 'weight' (update version 0 of 'weight')",
            ("op-step",),
            "weight",
            "device.weight",
        ),
    ),
    "more parts": (
        with_operand("op-head", 0, num_parts=2),
        OperandsDiffer(
            "op 'op-head' has operand 'hidden' (read version 1 of the first 2 parts of 'hidden') "
            "in slot 'device.hidden', where task 'head' has 'hidden' (read version 1 of the first "
            "1 parts of 'hidden')",
            ("op-head",),
            "hidden",
            "device.hidden",
        ),
    ),
    "another operand of a recompute": (
        with_operand("op-remake", 0, name="in"),
        OperandsDiffer(
            "op 'op-remake' has operand 'in' (write version 1 of 'hidden') in slot "
            "'device.hidden', where task 'remake' has 'out' (write version 1 of 'hidden')",
            ("op-remake",),
            "hidden",
            "device.hidden",
        ),
    ),
    "a missing operand": (
        with_op("op-head", operands=HEAD_OP.operands[:1]),
        OperandsDiffer("op 'op-head' has 1 operands, task 'head' has 2", ("op-head",)),
    ),
    "an extra operand": (
        with_op("op-head", operands=(*HEAD_OP.operands, HEAD_OP.operands[0])),
        OperandsDiffer("op 'op-head' has 3 operands, task 'head' has 2", ("op-head",)),
    ),
    "an input that is not fed": (
        without("feed"),
        InputsDiffer("version 1 of 'tokens' is never fed item 0 of 'text'", tensor="tokens"),
    ),
    "a result that is not fetched": (
        without("fetch"),
        InputsDiffer("version 1 of 'loss' is never fetched as 'loss'", tensor="loss"),
    ),
    "another item of the input": (
        with_op("feed", index=1),
        InputsDiffer(
            "op 'feed': version 1 of 'tokens' in slot 'device.tokens' is fed item 1 of 'text', "
            "which is not in the chain or done twice",
            ("feed",),
            "tokens",
            "device.tokens",
        ),
    ),
    "a result fetched twice": (
        SCHEDULE.model_copy(
            update={"ops": (*SCHEDULE.ops, SCHEDULE.ops[-1].model_copy(update={"op_id": "fetch2"}))}
        ),
        InputsDiffer(
            "op 'fetch2': version 1 of 'loss' in slot 'device.loss' is fetched as 'loss', which "
            "is not in the chain or done twice",
            ("fetch2",),
            "loss",
            "device.loss",
        ),
    ),
    "a weight that is forgotten": (
        SCHEDULE.model_copy(update={"carried": ()}),
        PersistentNotCarried("persistent tensor 'weight' is not carried", tensor="weight"),
    ),
    "content of a pass that no state fills": (
        SCHEDULE.model_copy(
            update={"carried": (*SCHEDULE.carried, Carried(tensor="loss", slot="device.loss"))}
        ),
        CarriedNotPersistent(
            "tensor 'loss' is carried, and no state holds it before the first pass: only "
            "persistent tensors (parameters, optimizer state) are",
            tensor="loss",
        ),
    ),
    "content that is taken for granted": (
        SCHEDULE.model_copy(update={"consumed": (Carried(tensor="loss", slot="device.loss"),)}),
        ConsumedDiffers("'loss' is consumed by the schedule alone", tensor="loss"),
    ),
}


def test_the_small_schedule_conforms() -> None:
    assert conforms(SCHEDULE, CHAIN) == []
    require_conforming(SCHEDULE, CHAIN)


def test_work_may_leave_out_its_implementation_as_old_documents_do_but_not_name_another() -> None:
    named = Work(
        unit="attention_forward", shape=(), flops=1, hbm_bytes=1, launches=1,
        implementation="flash3",
    )  # fmt: skip
    chain = CHAIN.model_copy(update={"calls": {"call": CALL.model_copy(update={"cost": (named,)})}})
    for implementation, conforming in (("flash3", True), (None, True), ("flash2", False)):
        cost = (named.model_copy(update={"implementation": implementation}),)
        calls = {"call": CALL.model_copy(update={"cost": cost})}
        found = conforms(SCHEDULE.model_copy(update={"calls": calls}), chain)
        assert (found == []) == conforming


def test_a_recompute_may_be_left_out_or_be_any_of_its_group() -> None:
    for recomputes in ((), (REMAKE_OP,), (OTHER_OP,)):
        assert conforms(computing(STEP_OP, *recomputes, HEAD_OP), CHAIN) == []


@pytest.mark.parametrize("name", CASES)
def test_a_difference_is_named_with_op_tensor_and_slot(name: str) -> None:
    schedule, expected = CASES[name]
    found = conforms(schedule, CHAIN)
    assert expected in found, "\n".join(map(str, found))
    assert len(set(found)) == len(found)
    with pytest.raises(UnsafeSchedule) as caught:
        require_conforming(schedule, CHAIN)
    assert caught.value.violations == found


def test_every_rule_is_broken_by_a_case_of_verify_or_conforms() -> None:
    """Those of a disk are in test_disk_damages.py."""
    cases = [*CASES.values(), *VERIFY_CASES.values()]
    of_one_device = set(Violation.__subclasses__()) - {ClusterViolation, DiskMisused}
    assert {type(expected) for _, expected in cases} == of_one_device


def test_an_input_that_the_chain_wants_twice_must_be_fed_twice() -> None:
    twice = CHAIN.model_copy(update={"inputs": CHAIN.inputs * 2})
    missing = InputsDiffer("version 1 of 'tokens' is never fed item 0 of 'text'", tensor="tokens")
    assert conforms(SCHEDULE, twice) == [missing]


def test_kernels_may_not_take_more_beside_the_arena_than_the_caps_say() -> None:
    chain: Chain = CHAIN.model_copy(update={"library_bytes": 1000})
    for declared in (1000, 1001):
        caps = SCHEDULE.caps.model_copy(update={"library_bytes": declared})
        assert conforms(SCHEDULE.model_copy(update={"caps": caps}), chain) == []
    missing = WorkDiffers("caps.library_bytes is 0, kernels take up to 1,000 beside the arena")
    assert conforms(SCHEDULE, chain) == [missing]


def test_every_part_of_a_persistent_tensor_must_be_carried() -> None:
    chain: Chain = CHAIN.model_copy(update={"persistent": ("weight", "hidden")})
    assert [v.tensor for v in conforms(SCHEDULE, chain)] == ["hidden.0", "hidden.1"]


def test_an_exchange_of_one_device_is_no_task_of_the_chain():
    at = next(op for op in SCHEDULE.ops if op.kind == "compute")
    exchange = Communicate(
        op_id="evil", stream=at.stream, collective="all_reduce", axes=("dp",), sequence=0,
        operands=at.operands[:1], label=Label(kind="x"),
    )  # fmt: skip
    more = SCHEDULE.model_copy(update={"ops": (*SCHEDULE.ops, exchange)})
    found = conforms(more, CHAIN)
    assert any(isinstance(one, TaskUnexpected) and "exchange (all_reduce)" in one.message
               for one in found)  # fmt: skip
    assert not any("evil" in one.message for one in conforms(more, CHAIN, of_mesh=True))

"""`verify`, rule by rule, on one small pipeline."""

from random import Random

import pytest

from tests.schedule.cluster.oracle import problems
from tests.schedule.cluster.pipeline import (
    FIRST,
    MESH,
    ORDER,
    SECOND,
    changed,
    cluster,
    compute,
    operand,
    say,
    schedule,
)
from tests.schedule.cluster.small_clusters import cluster_of, mesh_of
from twinstream.schedule.cluster.verify import require_safe, verify
from twinstream.schedule.cluster.violations import ClusterViolation
from twinstream.schedule.document import RankClass, Schedule
from twinstream.schedule.errors import ArgumentError
from twinstream.schedule.proof.violations import UnsafeSchedule


def only(document: Schedule, kind: str) -> ClusterViolation:
    """The one violation there is; the oracle does not like the document either."""
    [violation] = verify(document)
    assert type(violation).__name__ == kind, violation
    assert isinstance(violation, ClusterViolation)
    assert problems(document, Random(0))
    return violation


def test_the_pipeline_is_safe() -> None:
    assert verify(cluster()) == []
    assert problems(cluster(), Random(0)) == set()
    require_safe(cluster())


def test_what_is_unsafe_is_refused_with_what_was_found() -> None:
    with pytest.raises(UnsafeSchedule, match="OrderWrong: second/sum is in no exchange"):
        require_safe(cluster(order=ORDER[:3]))
    with pytest.raises(ArgumentError):
        verify(schedule(FIRST))  # type: ignore[arg-type]


def test_a_class_is_named_with_what_its_schedule_breaks() -> None:
    document = cluster()
    ops = changed(document.schedules["second"].ops, "backward", waits=())
    broken = document.schedules["second"].model_copy(update={"ops": ops})
    found = verify(
        document.model_copy(update={"schedules": {**document.schedules, "second": broken}})
    )
    assert (
        "ClassUnsafe: class 'second': ReadTooEarly: op 'backward' reads version 1 of 'x' in "
        in (str(found[0]))
    )
    assert isinstance(found[0], ClusterViolation)
    assert (found[0].classes, found[0].ops, found[0].tensor) == (
        ("second",), ("backward", "take"), "x"
    )  # fmt: skip


def test_a_schedule_of_several_classes_is_verified_once() -> None:
    cells = {
        "first.0": {"pp": (0,), "dp": (0,)}, "first.1": {"pp": (0,), "dp": (1,)},
        "second": {"pp": (1,)},
    }  # fmt: skip
    document = cluster(cells=cells)
    ops = changed(document.schedules["first"].ops, "step", waits=())
    broken = document.schedules["first"].model_copy(update={"ops": ops})
    document = document.model_copy(update={"schedules": {**document.schedules, "first": broken}})
    found = verify(document)
    assert {type(v).__name__ for v in found} == {"ClassUnsafe"}
    assert all(str(v).startswith("ClassUnsafe: class 'first.0' (and 1 more): ") for v in found)
    assert len(set(map(str, found))) == len(found)


def test_a_rank_in_two_classes() -> None:
    document = cluster(cells={"first": {"pp": (0,)}, "second": {"dp": (1,)}})
    violation = only(document, "ClassesNotPartition")
    assert violation.message == "the rank at pp 0, dp 1 is in class 'first' and in class 'second'"
    assert violation.classes == ("first", "second")


def test_a_rank_in_no_class() -> None:
    document = cluster(cells={"first": {"pp": (0,)}, "second": {"pp": (1,), "dp": (1,)}})
    assert only(document, "ClassesNotPartition").message == "1 of 4 ranks are in no class"


def test_an_axis_that_the_mesh_lacks() -> None:
    document = cluster(changed(FIRST, "sum", axes=("tp",)))
    text = "op 'sum' (all_reduce) of class 'first' is along axis 'tp', the mesh has pp, dp"
    assert only(document, "UnknownAxis").message == text


def test_an_axis_named_twice() -> None:
    document = cluster(changed(FIRST, "sum", axes=("dp", "dp")))
    text = "op 'sum' (all_reduce) of class 'first' names an axis twice in dp, dp"
    assert only(document, "UnknownAxis").message == text


def test_a_sequence_that_leaves_one_out() -> None:
    document = cluster(changed(FIRST, "sum", sequence=1))
    assert only(document, "SequenceWrong").message == (
        "op 'sum' (all_reduce) of class 'first' has sequence 1, but is number 0 of 'dp' along dp"
    )


@pytest.mark.parametrize(
    ("collective", "operands", "why"),
    [
        ("all_reduce", [operand("g", "read")], "takes update operands only, it has read of 256"),
        (
            "all_gather", [operand("g", "read"), operand("shard", "write")],
            "is among 2 ranks, where the write has the bytes of all reads: it has read of 256 "
            "bytes, write of 128 bytes",
        ),
        (
            "reduce_scatter", [operand("shard", "write"), operand("w", "read", 0)],
            "is among 2 ranks, where the read has the bytes of all writes, or so many pieces: it "
            "has write of 128 bytes, read of 64 bytes",
        ),
        ("all_to_all", [operand("g", "update")], "takes one read and one write, it has update"),
        ("all_to_all", [operand("g", "read"), operand("x", "write")], "both have equal bytes"),
        ("send_recv", [operand("g", "update")], "takes one read and one write, it has update"),
        ("send_recv", [operand("g", "read"), operand("x", "write")], "both have equal bytes"),
        (
            "all_gather", [operand("g", "update"), operand("shard", "write")],
            "takes one read and one write, or one update, it has update of 256 bytes, write of 128",
        ),
    ],
)  # fmt: skip
def test_operands_that_do_not_suit_the_collective(collective, operands, why) -> None:
    op = say("sum", collective, "dp", *operands)
    violation = only(cluster((*FIRST[:-1], op)), "OperandsUnsuited")
    start = f"op 'sum' ({collective}) of class 'first' "
    assert violation.message.startswith(start) and why in violation.message


@pytest.mark.parametrize(
    ("collective", "operands"),
    [
        ("all_gather", [operand("shard", "read"), operand("g", "write", 2)]),
        ("reduce_scatter", [operand("g", "read"), operand("shard", "write", 2)]),
        ("reduce_scatter", [operand("g", "update")]),
        ("all_to_all", [operand("x", "read"), operand("dx", "write", 2)]),
        ("send_recv", [operand("x", "read"), operand("dx", "write", 2)]),
    ],
)  # fmt: skip
def test_operands_that_suit(collective, operands) -> None:
    made = compute("make", operand("shard", "write"))
    document = cluster((*FIRST[:-1], made, say("sum", collective, "dp", *operands)))
    assert verify(document) == []


def test_an_update_that_the_ranks_do_not_divide() -> None:
    document = cluster()
    first = document.schedules["first"]
    tensors = tuple(
        t.model_copy(update={"size_bytes": 255}) if t.tensor_id == "g" else t for t in first.tensors
    )
    ops = changed(first.ops, "sum", collective="all_gather")
    broken = first.model_copy(update={"tensors": tensors, "ops": ops})
    document = document.model_copy(update={"schedules": {**document.schedules, "first": broken}})
    assert only(document, "OperandsUnsuited").message == (
        "op 'sum' (all_gather) of class 'first' is among 2 ranks, which do not divide the 255 "
        "bytes of its update"
    )


def test_a_group_whose_classes_overlap_on_the_other_axes() -> None:
    """Along pp, ranks of `second` meet one or the other half of the first stage."""
    alone = (
        compute("make", operand("g", "write")),
        say("sum", "all_reduce", "pp", operand("g", "update")),
    )
    cells = {
        "first.0": {"pp": (0,), "dp": (0,)}, "first.1": {"pp": (0,), "dp": (1,)},
        "second": {"pp": (1,)},
    }  # fmt: skip
    sides = [("first.0", "sum"), ("first.1", "sum"), ("second", "sum")]
    found = verify(cluster(alone, alone, [sides], cells))
    assert problems(cluster(alone, alone, [sides], cells), Random(0)) == {"symmetry"}
    assert [str(violation) for violation in found] == [
        f"GroupNotSymmetric: 'pp' along pp some ranks of class '{name}' meet class 'second' and "
        "others do not, or the other way round: their cells on the other axes overlap and differ"
        for name in ("first.0", "first.1")
    ]


def test_a_message_to_half_a_class() -> None:
    cells = {
        "first.0": {"pp": (0,), "dp": (0,)}, "first.1": {"pp": (0,), "dp": (1,)},
        "second": {"pp": (1,)},
    }  # fmt: skip
    order = [
        [("first.0", "give"), ("first.1", "give"), ("second", "take")],
        [("first.0", "take"), ("first.1", "take"), ("second", "give")],
        [("first.0", "sum"), ("first.1", "sum")],
        [("second", "sum")],
    ]
    document = cluster(order=order, cells=cells)
    found = verify(document)
    assert {type(violation).__name__ for violation in found} == {"GroupNotSymmetric"}
    assert found[0].message == (
        "send along pp by 1 the ranks that class 'first.0' meets in op 'give' are no class: its "
        "cell, shifted, must be the cell of one class with equal cells on the other axes"
    )
    assert problems(document, Random(0)) == {"symmetry"}


def test_a_message_to_itself() -> None:
    around = [changed(ops, name, shift=2 * by) for ops, name, by in
              ((changed(FIRST, "take", shift=-2), "give", 1), (SECOND, "take", -1))]  # fmt: skip
    found = verify(cluster(around[0], around[1]))
    assert found[0].message == (
        "op 'give' of class 'first' is a message to itself: shift 2 is a multiple of the 2 ranks "
        "of axis 'pp'"
    )


def test_a_side_that_is_missing() -> None:
    document = cluster(second=[op for op in SECOND if op.op_id != "give"])
    violation = only(document, "SideMissing")
    assert violation.message == (
        "class 'first' has 1 ops of recv along pp by 1, and class 'second', which they meet, has 0 "
        "of send along pp by -1: op 'take' of class 'first' is alone"
    )
    assert (violation.ops, violation.classes) == (("take",), ("first", "second"))


def test_a_class_of_a_group_that_says_nothing() -> None:
    cells = {
        "first": {"pp": (0,), "dp": (0,)}, "second": {"pp": (0,), "dp": (1,)},
        "first.2": {"pp": (1,)},
    }  # fmt: skip
    alone = (compute("make", operand("g", "write")), FIRST[4])
    order = [[("first", "sum")], [("first.2", "sum")]]
    assert only(cluster(alone, (), order, cells), "SideMissing").message == (
        "class 'first' has 1 ops of 'dp' along dp, and class 'second', which they meet, has 0 of "
        "'dp' along dp: op 'sum' of class 'first' is alone"
    )


def test_sides_that_differ_in_version() -> None:
    second = changed(SECOND, "take", operands=(operand("x", "write", 2),))
    second = changed(
        second, "backward", operands=(operand("x", "read", 2), *SECOND[1].operands[1:])
    )
    assert only(cluster(second=second), "SidesDiffer").message == (
        "op 'give' of class 'first' (version 1 of 'x', 64 bytes of uint8) meets op 'take' of class "
        "'second' (version 2 of 'x', 64 bytes of uint8)"
    )


@pytest.mark.parametrize(
    ("update", "one", "other"),
    [
        ({"collective": "all_gather"}, "all_reduce", "all_gather"),
        ({"reduction": "rank_order"}, "library", "rank_order"),
    ],
)
def test_sides_of_a_collective_that_differ(update, one, other) -> None:
    cells = {"first": {"dp": (0,)}, "second": {"dp": (1,)}}
    ops = (compute("make", operand("g", "write")), FIRST[4])
    sides = [("first", "sum"), ("second", "sum")]
    document = cluster(ops, changed(ops, "sum", **update), [sides], cells)
    assert only(document, "SidesDiffer").message == (
        f"op 'sum' of class 'first' ({one}) meets op 'sum' of class 'second' ({other})"
    )


def test_sides_that_read_what_the_other_writes() -> None:
    cells = {"first": {"dp": (0,)}, "second": {"dp": (1,)}}
    one, other = (
        (compute("make", operand(given, "write")), say("swap", "all_to_all", "dp", *operands))
        for given, operands in (
            ("x", [operand("x", "read"), operand("dx", "write")]),
            ("dx", [operand("x", "write"), operand("dx", "read")]),
        )
    )
    document = cluster(one, other, [[("first", "swap"), ("second", "swap")]], cells)
    assert only(document, "SidesDiffer").message == (
        "op 'swap' of class 'first' (read) meets op 'swap' of class 'second' (write)"
    )


@pytest.mark.parametrize("sum_first", [True, False])
def test_nothing_is_said_between_the_two_sides_of_a_ring(sum_first: bool) -> None:
    """There is no order of the exchanges that would be that of the class."""
    take = operand("x", "write").model_copy(update={"slot": "device.dx"})
    ops = (
        compute("make", operand("x", "write"), operand("g", "write")),
        say("give", "send", "pp", operand("x", "read"), shift=1),
        say("sum", "all_reduce", "dp", operand("g", "update")),
        say("take", "recv", "pp", take, shift=-1),
    )
    order = [[("all", "give"), ("all", "take")], [("all", "sum")]]
    one = RankClass(name="all", schedule="all", cells={})
    document = cluster_of(MESH, [one], {"all": schedule(ops)}, order[:: -1 if sum_first else 1])
    here, before = ("give", "sum") if sum_first else ("sum", "take")
    assert only(document, "OrderWrong").message == (
        f"exchange 1 has op '{here}' of class 'all' after an exchange with its op '{before}', "
        "which the class issues later"
    )


def test_exchanges_in_another_order_than_a_class_has_them() -> None:
    order = (ORDER[1], ORDER[0], *ORDER[2:])
    found = verify(cluster(order=order))
    assert [str(violation) for violation in found] == [
        "OrderWrong: exchange 1 has op 'give' of class 'first' after an exchange with its op "
        "'take', which the class issues later",
        "OrderWrong: exchange 1 has op 'take' of class 'second' after an exchange with its op "
        "'give', which the class issues later",
    ]
    assert problems(cluster(order=order), Random(0)) == {"order"}
    free = (ORDER[0], ORDER[1], ORDER[3], ORDER[2])
    assert verify(cluster(order=free)) == []


@pytest.mark.parametrize(
    ("order", "text"),
    [
        (ORDER[:-1], "second/sum is in no exchange"),
        ((*ORDER, ORDER[-1]), "exchange 4 is there twice: second/sum"),
        (
            (*ORDER[:2], [*ORDER[2], *ORDER[3]]),
            "exchange 2 has first/sum = second/sum, what meets is first/sum",
        ),
        (
            (*ORDER, [("second", "backward")]),
            "exchange 4 has side 'backward' of class 'second', which is no communication",
        ),
        (
            (*ORDER, [("third", "sum")]),
            "exchange 4 has side 'sum' of class 'third', which is no communication",
        ),
    ],
)
def test_an_order_that_is_not_of_what_meets(order, text) -> None:
    found = verify(cluster(order=order))
    assert found[0].message == text
    assert {type(violation).__name__ for violation in found} == {"OrderWrong"}
    assert problems(cluster(order=order), Random(0)) == {"order"}


def test_sends_that_cross_on_one_stream() -> None:
    """Either stage sends first, and receives on the stream that still sends."""
    both = [
        (
            compute("make", operand(mine, "write")),
            say("give", "send", "pp", operand(mine, "read"), shift=by, queue="p2p"),
            say("take", "recv", "pp", operand(its, "write"), shift=by, queue="p2p"),
        )
        for mine, its, by in (("x", "dx", 1), ("dx", "x", -1))
    ]
    violations = verify(cluster(both[0], both[1], ORDER[:2]))
    assert str(violations[0]) == (
        "Deadlock: what waits comes round (a -> b: b waits for a, a = b: they meet): first/give -> "
        "first/take = second/give -> second/take = first/give"
    )
    assert problems(cluster(both[0], both[1], ORDER[:2]), Random(0)) == {"stuck"}


@pytest.mark.parametrize(
    ("fields", "safe"),
    [
        ({"waits": ("give",)}, False),
        ({"waits_previous": ("give",)}, True),  # the pass before is through by then
        ({"queue": "send"}, False),
        ({}, True),
    ],
)
def test_a_ring_whose_receipt_waits_for_its_send(fields, safe) -> None:
    """All ranks send first and take only what has been sent: none begins to receive."""
    ops = (
        compute("make", operand("x", "write")),
        say("give", "send", "dp", operand("x", "read"), shift=1),
        say("take", "recv", "dp", operand("x", "write").model_copy(update={"slot": "device.dx"}),
            shift=-1, queue=fields.get("queue", "recv")),
    )  # fmt: skip
    made = schedule(ops)
    waits = {name: value for name, value in fields.items() if name != "queue"}
    made = made.model_copy(update={"ops": changed(made.ops, "take", **waits)})
    one = RankClass(name="all", schedule="all", cells={})
    document = cluster_of(MESH, [one], {"all": made}, [[("all", "give"), ("all", "take")]])
    if safe:
        assert verify(document) == []
        assert problems(document, Random(0)) == set()
        return
    assert only(document, "Deadlock").message.endswith(": all/give -> all/take = all/give")


def test_many_ranks_cost_nothing() -> None:
    """Two stages of 65,536 ranks each."""
    document = cluster().model_copy(update={"mesh": mesh_of(pp=2, dp=65_536)})
    assert document.mesh.size == 131_072
    assert verify(document) == []

"""Slots that messages share, and a chain planned with several tasks as one."""

from twinstream.models.lowering.chain_builder import CollectiveCall
from twinstream.planner.emit.merged_chain import MergedChain, without_tensors
from twinstream.planner.emit.task_ops import resident_schedule
from twinstream.planner.pack.slot_pools import pooled_slots
from twinstream.schedule.chain import Chain, SlotPools, Task
from twinstream.schedule.document import Caps
from twinstream.schedule.ops import KernelCall, Label, TaskOperand
from twinstream.schedule.proof.verify import verify_rank
from twinstream.schedule.tensors import Tensor
from twinstream.schedule.workload import MachineRef, ModelRef, Workload

REF = MachineRef(name="toy", content_hash="")
NUM = 6
SEND_ID, SEND = "send", CollectiveCall("send", ("pp",), "send.next", 1).call


def tensor(name: str, size_bytes: int = 1000) -> Tensor:
    return Tensor(
        tensor_id=name, size_bytes=size_bytes, role="activation", dtype="uint8",
        shape=(size_bytes,),
    )  # fmt: skip


def operand(name: str, version: int, mode: str) -> TaskOperand:
    return TaskOperand(name=name, tensor=name, version=version, mode=mode)


def task(task_id: str, call: str, *operands: TaskOperand) -> Task:
    return Task(task_id=task_id, call=call, operands=operands, label=Label(kind=call))


def chain() -> Chain:
    """Each microbatch updates what is carried, makes a message, and sends it."""
    tasks = []
    for j in range(NUM):
        made = operand(f"message.{j}", 1, "write"), operand("state", j, "update")
        tasks.append(task(f"make.{j}", "make", *made))
        tasks.append(task(f"send.{j}", SEND_ID, operand(f"message.{j}", 1, "read")))
    return Chain(
        tensors=(tensor("state"), *(tensor(f"message.{j}") for j in range(NUM))),
        calls={"make": KernelCall(kernel="toy.make", attributes={}, cost=()), SEND_ID: SEND},
        tasks=tuple(tasks), recomputes=(), inputs=(), outputs=(), persistent=("state",),
        round_starts=(0,), model=ModelRef(name="toy", content_hash="", spec={}), recipe={},
        workload=Workload(seq_len=1, chunk_tokens=1, chunks_per_round=1, rounds_per_step=1),
        model_flops=1,
    )  # fmt: skip


def pooled(whole: Chain, spare: int) -> Chain:
    pools = SlotPools({f"message.{j}": ("messages", spare) for j in range(NUM)})
    return whole.model_copy(update={"pools": pools})


def test_messages_take_turns_in_as_many_slots_as_are_spare_and_one_more():
    for spare in (0, 1, 2):
        slots = pooled_slots(pooled(chain(), spare))
        turns = [slots[f"message.{j}"].slot_id for j in range(NUM)]
        assert turns == [f"messages.{j % (spare + 1)}" for j in range(NUM)]


def test_a_message_under_way_is_waited_for_only_when_its_slot_comes_round():
    for spare in (0, 1, 2):
        schedule = resident_schedule(pooled(chain(), spare), REF, Caps())
        assert verify_rank(schedule) == []
        for op in schedule.ops:
            if op.op_id.startswith("make."):
                j = int(op.op_id.removeprefix("make."))
                assert op.waits == ((f"send.{j - spare - 1}",) if j > spare else ())
                assert op.waits_previous == ((f"send.{NUM - spare - 1 + j}",) if j <= spare else ())
        sent = [op.sequence for op in schedule.ops if op.kind == "communicate"]
        assert sent == list(range(NUM))


def test_a_tensor_in_several_slots_has_one_for_each_of_its_buffers():
    both = task("two", SEND_ID, operand("message.0", 1, "read"), operand("message.1", 1, "read"))
    several = SlotPools(
        {"message.0": ("ring", 0), "message.0#1": ("ring", 0)},
        {"send.1": {"message.1": "message.0#1"}},
    )
    whole = chain().model_copy(update={"tasks": (*chain().tasks, both), "pools": several})
    found = pooled_slots(whole)
    assert found["message.0"].slot_id != found["message.0#1"].slot_id


def test_what_was_planned_as_one_task_is_written_out_as_its_own():
    """Two microbatches are a task of the planner's, which sees no message."""
    whole = chain()
    members, merged = {}, []
    for j in range(0, NUM, 2):
        members[f"make.{j}"] = whole.tasks[2 * j : 2 * j + 4]
        operands = operand("state", j, "read"), operand("state", j + 2, "write")
        merged.append(task(f"make.{j}", "make", *operands))
    apart = [f"message.{j}" for j in range(NUM)]
    lean = without_tensors(whole, apart, members)
    assert [one.operands for one in lean.tasks] == [
        (operand("state", j, "update"),) for j in range(0, NUM, 2)
    ]
    planned = lean.model_copy(update={"tasks": tuple(merged)})
    found = MergedChain(pooled(whole, 1), planned, members, apart)
    assert found.apart_bytes == 2 * 1024
    assert found.left_of(Caps(device_bytes=5000)).device_bytes == 5000 - 2 * 1024
    plan = resident_schedule(planned, REF, Caps())
    schedule = found.written_out(plan, Caps())
    assert [op.op_id for op in schedule.ops] == [one.task_id for one in whole.tasks]
    assert verify_rank(schedule) == []
    assert schedule.calls == {"make": whole.calls["make"]}
    resident = resident_schedule(pooled(whole, 1), REF, Caps())
    assert {op.op_id: op.waits for op in schedule.ops} == {
        op.op_id: op.waits for op in resident.ops
    }

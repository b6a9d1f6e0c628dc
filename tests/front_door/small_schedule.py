"""A schedule of six ops whose figures can be worked out by hand."""

from twinstream.models.spec import ModelSpec
from twinstream.schedule.cost import Work
from twinstream.schedule.document import Caps, RankSchedule, Schedule
from twinstream.schedule.ops import Compute, Copy, KernelCall, Label, Stream
from twinstream.schedule.tensors import DEVICE, HOST, Slot, Tensor
from twinstream.schedule.timeline import PassSpans, Provenance, RankTimeline, Timeline
from twinstream.schedule.workload import MachineRef, Workload

SPEC = ModelSpec(
    name="toy", num_layers=1, d_model=8, num_heads=2, num_kv_heads=1, head_dim=4, d_ff=16,
    vocab_size=16, dtype="float32",
)  # fmt: skip
FORWARD_FLOPS, NORM_FLOPS, MODEL_FLOPS = 600, 50, 1000


def small_schedule() -> Schedule:
    """Two loads, two forwards of which one is a recompute, a copy back, a last forward."""
    rank = RankSchedule(
        tensors=(
            Tensor(tensor_id="w", size_bytes=1024, role="parameter", dtype="float32", shape=(256,)),
            Tensor(tensor_id="x", size_bytes=512, role="activation", dtype="float32", shape=(128,)),
        ),
        slots=(
            Slot(slot_id="device.w", tier=DEVICE, offset_bytes=0, size_bytes=1024),
            Slot(slot_id="device.x", tier=DEVICE, offset_bytes=1024, size_bytes=512),
            Slot(slot_id="host.w", tier=HOST, offset_bytes=0, size_bytes=1024),
            Slot(slot_id="host.x", tier=HOST, offset_bytes=2048, size_bytes=512),
        ),
        calls={
            "forward": KernelCall(
                kernel="block_forward/eager",
                attributes={},
                cost=(_work("matmul", FORWARD_FLOPS), _work("rms_norm", NORM_FLOPS)),
            )
        },
        ops=(
            _copy("h2d", "w"),
            _compute("first", Label(kind="block_forward")),
            _copy("h2d", "x"),
            _compute("again", Label(kind="block_recompute", level="INPUT")),
            _copy("d2h", "x"),
            _compute("last", Label(kind="block_forward")),
        ),
        carried=(),
        caps=Caps(device_bytes=4096, device_reserve_bytes=100),
        workload=Workload(seq_len=8, chunk_tokens=16, chunks_per_round=1, rounds_per_step=2),
        model=SPEC.ref(),
        recipe={},
        model_flops=MODEL_FLOPS,
        machine=MachineRef(name="cpu", content_hash="0"),
        policy="by hand",
    )
    return Schedule.of_rank(rank)


def timeline(*lasting_ns: int, step_ns: float = 2000.0, kind: str = "simulated") -> Timeline:
    """One pass in which the ops last so long, one after the other."""
    starts = tuple(sum(lasting_ns[:i]) for i in range(len(lasting_ns)))
    spans = PassSpans(
        start_ns=starts,
        end_ns=tuple(start + lasts for start, lasts in zip(starts, lasting_ns, strict=True)),
    )
    rank = RankTimeline(
        op_ids=tuple(op.op_id for op in small_schedule().ops),
        passes=(spans,),
        cold=spans,
        step_ns=step_ns,
        provenance=Provenance.model_validate({"kind": kind, "where": "here"}),
    )
    return Timeline.of_rank(rank)


def _work(unit: str, flops: int) -> Work:
    return Work(unit=unit, shape=(1,), flops=flops, hbm_bytes=0, launches=1, dtype="float32")


def _copy(queue: str, tensor: str) -> Copy:
    slots = f"host.{tensor}", f"device.{tensor}"
    source, destination = slots if queue == "h2d" else slots[::-1]
    return Copy(
        op_id=f"{queue}.{tensor}", stream=Stream(queue=queue), tensor=tensor, version=0,
        source=source, destination=destination,
    )  # fmt: skip


def _compute(op_id: str, label: Label) -> Compute:
    return Compute(
        op_id=op_id, stream=Stream(queue="compute"), task=op_id, call="forward", operands=(),
        label=label,
    )  # fmt: skip

"""The rules for a schedule: one class for each violation."""

from dataclasses import dataclass
from typing import ClassVar

from twinstream.schedule.errors import TwinstreamError


@dataclass(frozen=True)
class Violation:
    """A rule that a schedule breaks: which ops, tensor and slot, and a sentence about it."""

    message: str
    ops: tuple[str, ...] = ()
    tensor: str | None = None
    slot: str | None = None

    rule: ClassVar[str] = "a schedule is safe"

    def __str__(self) -> str:
        return f"{type(self).__name__}: {self.message}"


class BadWait(Violation):
    rule = "waits name ops issued earlier on other streams; waits_previous name ops of the body"


class BadPart(Violation):
    rule = "parts lie inside their parent, have no parts themselves and do not overlap"


class SlotMisaligned(Violation):
    rule = "slots start at a multiple of their tier's alignment"


class ArenaExceedsCap(Violation):
    rule = "every arena stays within its cap"


class UnknownTier(Violation):
    rule = "slots are in the memory of device 0, of the host or on disk 0: nothing runs elsewhere"


class DiskMisused(Violation):
    rule = "what lies on a disk is copied to or from host memory, on a queue of its own each"


class StreamMixed(Violation):
    rule = "what the host carries out (feed, fetch) is on streams of its own"


class TensorOutsideSlot(Violation):
    rule = "a tensor lies inside the slot it is used in"


class OperandInWrongMemory(Violation):
    rule = "a kernel's operands lie in the memory of the processor that it runs on"


class OperandsOverlap(Violation):
    rule = "an op does not write bytes that it also reads or writes as another operand"


class VersionOutOfOrder(Violation):
    rule = "versions of a tensor grow: a write makes a newer or the newest, an update the next"


class WrongContent(Violation):
    rule = "every access finds exactly the version it declares"


class ReadTooEarly(Violation):
    rule = "content is read only after the op that made it has surely completed"


class OverwriteTooEarly(Violation):
    rule = "bytes are overwritten only after their writer and all readers have surely completed"


class CarriedNotValid(Violation):
    rule = "every carried slot holds its tensor's final version when a pass ends"


class TensorDiffers(Violation):
    rule = "the schedule's tensors are the chain's"


class CallDiffers(Violation):
    rule = "kernels, attributes and costs are the chain's"


class TaskMissing(Violation):
    rule = "every task of the chain is carried out"


class TaskUnexpected(Violation):
    rule = "compute ops are the chain's tasks, each once and in order, and declared recomputes"


class OperandsDiffer(Violation):
    rule = "an op's operands are its task's: names, order, tensors, versions, modes"


class InputsDiffer(Violation):
    rule = "the host feeds exactly the chain's inputs and fetches exactly its outputs"


class StreamsDiffer(Violation):
    rule = "tasks of the device run one after the other, on one stream; likewise the host's"


class WorkDiffers(Violation):
    rule = "the model's FLOPs and the kernels' own memory are the chain's"


class CarriedNotPersistent(Violation):
    rule = "only persistent tensors are carried: a pass makes all others, and no state fills them"


class PersistentNotCarried(Violation):
    rule = "every persistent tensor is carried from pass to pass"


class ConsumedDiffers(Violation):
    rule = "a schedule consumes exactly what its chain does"


class UnsafeSchedule(TwinstreamError):
    """A schedule breaks rules; `violations` has them all."""

    def __init__(self, violations: list[Violation]) -> None:
        self.violations = violations
        shown = "\n  ".join(str(v) for v in violations[:5])
        more = f"\n  (and {len(violations) - 5} more)" if len(violations) > 5 else ""
        super().__init__(
            f"the schedule breaks {len(violations)} rule(s) and will not be run:\n  {shown}{more}\n"
            "Plan it again, or undo the edit that broke it."
        )

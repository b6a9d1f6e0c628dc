"""The rules for the schedule of a cluster: one class for each violation."""

from dataclasses import dataclass

from twinstream.schedule.proof.violations import Violation


@dataclass(frozen=True)
class ClusterViolation(Violation):
    """A rule that the schedule of a cluster breaks, and which classes of ranks are involved."""

    classes: tuple[str, ...] = ()

    rule = "the schedule of a cluster is safe"


class ClassUnsafe(ClusterViolation):
    rule = "every class's schedule is safe"


class ClassesNotPartition(ClusterViolation):
    rule = "every rank of the mesh is in exactly one class"


class UnknownAxis(ClusterViolation):
    rule = "the axes of a communication are different axes of the mesh"


class SequenceWrong(ClusterViolation):
    rule = "a class's sequence numbers on a communicator are 0, 1, 2, ... in issue order"


class OperandsUnsuited(ClusterViolation):
    rule = "modes and sizes of operands are those that the collective needs"


class GroupNotSymmetric(ClusterViolation):
    rule = "all ranks of a class meet ranks of the same classes, and never themselves in a message"


class SideMissing(ClusterViolation):
    rule = "all classes of a group, and both ends of a message, have equally many ops of it"


class SidesDiffer(ClusterViolation):
    rule = "sides that meet agree in what they do and in tensors, versions, types and sizes"


class OrderWrong(ClusterViolation):
    rule = "the order has all that meets, once, and every class issues its part in that order"


class Deadlock(ClusterViolation):
    rule = "no communication waits for itself, through streams, waits and those it meets"

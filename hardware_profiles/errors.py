"""The errors of a machine's profile."""

from collections.abc import Sequence

from twinstream.schedule.errors import TwinstreamError


class ProfileError(TwinstreamError):
    """A profile cannot be found, read, understood or written."""


class MissingNumberError(TwinstreamError):
    """A prediction needs a number that the machine's profile does not state."""

    def __init__(
        self, *, machine: str, field: str, stated_by: Sequence[str], toml_line: str
    ) -> None:
        self.machine, self.field, self.stated_by = machine, field, tuple(stated_by)
        shipped = ", ".join(stated_by) if stated_by else "none"
        super().__init__(
            f"the profile of machine '{machine}' has no {field}, and a missing number is not zero. "
            f"Shipped profiles that state it: {shipped}. "
            f"Add it at the top of the profile, before the first [table]: {toml_line}; or measure "
            "there: `twinstream probe` (on a CPU with --dtype bfloat16 for models in bf16)"
        )


class MissingNetworkNumberError(TwinstreamError):
    """A prediction needs a number that the cluster's profile does not state."""

    def __init__(self, *, cluster: str, field: str) -> None:
        self.cluster, self.field = cluster, field
        super().__init__(
            f"the profile of cluster '{cluster}' has no {field}, and a missing number is not zero. "
            "Add it at the top of the profile, before the first [table]: "
            f'{field} = {{ value = ..., kind = "datasheet", source = "..." }}'
        )


class ClusterSizeError(TwinstreamError):
    """More GPUs are asked for than a cluster has."""


class CollectiveTableError(TwinstreamError):
    """A file is no table of measured collectives; says where, and what is needed."""


class NoTimeError(TwinstreamError):
    """All that a step needs is unconstrained or free, so that there is no rate to state."""

    def __init__(self, *, machine: str) -> None:
        self.machine = machine
        super().__init__(
            f"the step takes 0 ns on machine '{machine}': all that it needs is unconstrained or "
            "free there. State what limits it in the profile, for example peak_bf16_flop_per_s."
        )


class TooLongError(TwinstreamError):
    """A step takes longer than any clock here counts."""


class UnknownDtypeError(TwinstreamError):
    """No peak of a profile belongs to the dtype of a task's work."""


class CalibrationError(TwinstreamError):
    """A profile cannot be fitted to what was given."""

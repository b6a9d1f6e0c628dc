"""Which part of an architecture our kernels do not run: such models are priced alone."""

from twinstream.models.spec import RUN_HERE, ModelSpec
from twinstream.schedule.errors import TwinstreamError


class NotExecutableError(TwinstreamError):
    """A model of which sizes are known, and kernels are not here."""


def executor_refusal(spec: ModelSpec) -> str | None:
    """Why no kernels here run a model, by the field that stands in the way; None if they do.

    >>> from twinstream.models.presets import load_model
    >>> executor_refusal(load_model("gpt-1.7b")).partition(";")[0]
    'mlp = gelu (only SwiGLU feed-forward networks have kernels)'
    >>> executor_refusal(load_model("8b"))
    """
    usual = spec.usual_fields
    found = [
        f"{field} = {getattr(spec, field)} ({reason})"
        for field, (_, reason) in RUN_HERE.items()
        if field not in usual
    ]
    return "; ".join(found) or None


def require_executable(spec: ModelSpec) -> None:
    """Refuse a model that no kernels here run.

    Raises:
        NotExecutableError: says which fields stand in the way.
    """
    if (reason := executor_refusal(spec)) is not None:
        raise NotExecutableError(
            f"'{spec.name}' is planned for clusters only (--cluster), since nothing here runs it: "
            f"{reason}"
        )

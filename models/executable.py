"""Which part of an architecture our kernels do not run: such models are priced alone."""

from typing import TYPE_CHECKING

from twinstream.schedule.errors import TwinstreamError

if TYPE_CHECKING:
    from twinstream.models.spec import ModelSpec

# What our kernels run, of the fields that are also priced with other values; and why not those.
_RUN_HERE: dict[str, tuple[object, str]] = {
    "mlp": ("swiglu", "only SwiGLU feed-forward networks have kernels"),
    "norm": ("rms", "only RMSNorm has kernels"),
    "positions": ("rope", "only RoPE has kernels"),
    "max_positions": (0, "learned positions have no kernels"),
    "biases": (False, "only Q, K and V may have biases"),
    "dropout": (False, "dropout has no kernels"),
    "experts": (None, "experts have no kernels"),
}


class NotExecutableError(TwinstreamError):
    """A model of which sizes are known, and kernels are not here."""


def usual_fields(spec: "ModelSpec") -> set[str]:
    """Fields of which a document need not tell: they are as all that runs here has them."""
    return {name for name, (usual, _) in _RUN_HERE.items() if getattr(spec, name) == usual}


def executor_refusal(spec: "ModelSpec") -> str | None:
    """Why no kernels here run a model, by the field that stands in the way; None if they do.

    >>> from twinstream.models.presets import load_model
    >>> executor_refusal(load_model("gpt-1.7b")).partition(";")[0]
    'mlp = gelu (only SwiGLU feed-forward networks have kernels)'
    >>> executor_refusal(load_model("8b"))
    """
    usual = usual_fields(spec)
    found = [
        f"{field} = {getattr(spec, field)} ({reason})"
        for field, (_, reason) in _RUN_HERE.items()
        if field not in usual
    ]
    return "; ".join(found) or None


def require_executable(spec: "ModelSpec") -> None:
    """Refuse a model that no kernels here run.

    Raises:
        NotExecutableError: says which fields stand in the way.
    """
    if (reason := executor_refusal(spec)) is not None:
        raise NotExecutableError(
            f"'{spec.name}' is planned for clusters only (--cluster), since nothing here runs it: "
            f"{reason}"
        )

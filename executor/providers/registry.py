"""The providers of models that there are, by the name that models have of theirs."""

from collections.abc import Callable

from twinstream.executor.providers.provider import Provider
from twinstream.models.model import Model


def _decoders() -> Provider:
    from twinstream.executor.providers.decoders import Decoders

    return Decoders()


def _modules() -> Provider:
    from twinstream.executor.providers.modules import Modules

    return Modules()


PROVIDERS: dict[str, Callable[[], Provider]] = {"decoder": _decoders, "module": _modules}
"""What one needs is imported where it is asked for."""


def provider_of(model: Model) -> Provider:
    """Return what draws, reads, writes and runs a model."""
    return PROVIDERS[model.provider]()

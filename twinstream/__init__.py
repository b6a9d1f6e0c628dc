"""Plan, simulate and execute GPU training steps under memory limits, from one schedule.

All public names are those of `twinstream.public`, which is imported when one is asked for, so that
the command line heeds Ctrl-C before anything slow is imported.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twinstream.public import *  # noqa: F403

    __version__: str


def __getattr__(name: str) -> object:
    """A public name, the list of them, or the version."""
    if name == "__version__":
        from importlib.metadata import version

        return version("twinstream")
    if name == "__all__" or (_may_be_public(name) and name in _public_names()):
        return getattr(import_module("twinstream.public"), name)
    raise AttributeError(f"module 'twinstream' has no attribute '{name}'")


def _may_be_public(name: str) -> bool:
    """Not a module's name: `from twinstream import api` asks for it first, amid imports."""
    return not name.startswith("__") and find_spec(f"twinstream.{name}") is None


def __dir__() -> list[str]:
    return sorted([*_public_names(), "__version__"])


def _public_names() -> list[str]:
    # None while they are being imported, which asks for modules of this package.
    return getattr(import_module("twinstream.public"), "__all__", [])

"""The origin of a profile's speeds, in a few words."""

import re

from twinstream.hardware_profiles.schema import Machine

_OF_ALL = ("sustained", "attention_forward", "matmul")  # the first that is stated tells


def origin_of(machine: Machine) -> str:
    """Say where what kernels reach is from; peaks and rates say each where they are from.

    >>> from twinstream.hardware_profiles.loader import load_machine
    >>> origin_of(load_machine("h200")), origin_of(load_machine("rtx4090"))
    ('measured on the card', 'borrowed from rtx3090, scaled to its own datasheet')
    """
    stated = (machine.efficiency[key] for key in _OF_ALL if key in machine.efficiency)
    curve = next(stated, None)
    if curve is None:
        return "stated for no kernel"
    if curve.kind == "measured":
        return "measured on the card"
    if curve.kind == "fitted":
        table = re.search(r"[a-z0-9_]+\.csv", curve.source)
        return f"fitted to measured steps{f' ({table[0]} ...)' if table else ''}"
    lender = re.match(r"borrowed from ([a-z0-9_]+)", curve.source)
    return f"borrowed from {lender[1]}, scaled to its own datasheet" if lender else "assumed"

"""The link's two directions and both together: which rates go with which."""

from collections.abc import Mapping
from math import inf, isinf

H2D, D2H, DUPLEX = "pcie_h2d_bytes_per_s", "pcie_d2h_bytes_per_s", "pcie_duplex_bytes_per_s"
LINK_FIELDS = (H2D, D2H, DUPLEX)
DUPLEX_SHARE = "duplex_h2d_share"
_CLOSE = 1e-9


def link_fault(rates: Mapping[str, float]) -> str | None:
    """Return what is wrong with a duplex rate below one direction or above the sum of both.

    >>> link_fault({H2D: 64e9, D2H: 64e9, DUPLEX: 50e9}).partition(",")[0]
    'pcie_duplex_bytes_per_s is 5e+10'
    """
    if len(rates) < 3 or any(map(isinf, rates.values())):
        return None
    least, most = max(rates[H2D], rates[D2H]), rates[H2D] + rates[D2H]
    if least * (1 - _CLOSE) <= rates[DUPLEX] <= most * (1 + _CLOSE):
        return None
    return (
        f"{DUPLEX} is {rates[DUPLEX]:g}, and both directions together carry at least what the "
        f"faster carries alone, {least:g}, and at most {most:g}: state {DUPLEX} = {most:g}, or "
        "what was measured"
    )


def duplex_that_follows(before: Mapping[str, float], h2d: float, d2h: float) -> float:
    """Both directions together where these change: the same share of their sum.

    >>> duplex_that_follows({H2D: 64e9, D2H: 64e9, DUPLEX: 128e9}, 128e9, 64e9)
    192000000000.0
    """
    if isinf(h2d) or isinf(d2h) or isinf(before[DUPLEX]):
        return inf
    share = before[DUPLEX] / (before[H2D] + before[D2H])
    return max(h2d, d2h, share * (h2d + d2h))


def duplex_weights(h2d: float, d2h: float, duplex: float, h2d_share: float) -> tuple[float, float]:
    """Return how much of the duplex rate a byte of H2D and one of D2H takes.

    With both busy H2D has `h2d_share` of it and D2H the rest, where fair sharing gives each as much
    of the weighted rate: 1 / (2 share) and 1 / (2 (1 - share)). Alone a direction keeps its own
    rate, so that no weight is above duplex / rate; with nothing to share each weighs 1.

    Args:
        h2d: usable bytes per second of a direction alone, as `d2h`.

    >>> duplex_weights(50e9, 50e9, 80e9, 0.5), duplex_weights(50e9, 50e9, 80e9, 0.4)
    ((1.0, 1.0), (1.25, 0.8333333333333334))
    """
    if isinf(duplex) or duplex >= (h2d + d2h) * (1 - _CLOSE):
        return 1.0, 1.0
    least, most = min(h2d / duplex, 1.0) / 2, 1 - min(d2h / duplex, 1.0) / 2
    share = min(max(h2d_share, least), most)
    return 1 / (2 * share), 1 / (2 * (1 - share))


def link_following(before: Mapping[str, float], changes: Mapping[str, float]) -> dict[str, float]:
    """Return what else of the link changes with some of its rates, so that it stays one.

    Both together follow the directions; a direction is no faster than both together, and both are
    no faster than their sum. What is changed explicitly in both ways stays as given.

    Args:
        before: the rates there are; with one missing nothing follows.
        changes: the new ones.
    """
    if len(before) < 3 or not (changes.keys() & before.keys()):
        return {}
    h2d, d2h = (changes.get(way, before[way]) for way in (H2D, D2H))
    if DUPLEX not in changes:
        return {DUPLEX: duplex_that_follows(before, h2d, d2h)}
    if H2D in changes or D2H in changes:
        return {}
    duplex = changes[DUPLEX]
    slower = {way: duplex for way in (H2D, D2H) if duplex < before[way]}
    return slower or ({DUPLEX: h2d + d2h} if h2d + d2h < duplex < inf else {})

"""Published scaling laws by name: the size and the tokens that are best for so many FLOPs."""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from twinstream.schedule.node import Node

_FLOPS = 6  # a parameter and token, of the forward and the backward pass
_MIDDLE_FLOPS = 1.3e20  # of the runs of Hoffmann et al., 6e18 to 3e21: there an exponent is known


class LossLaw(Node):
    """E + A / N^alpha + B / D^beta nats a token, of N parameters and D tokens."""

    e: float
    a: float
    b: float
    alpha: float
    beta: float

    def loss(self, params: float, tokens: float) -> float:
        """
        >>> round(law_named("chinchilla-3").loss.loss(70e9, 1.4e12), 2)
        1.92
        """
        return float(self.e + self.a / params**self.alpha + self.b / tokens**self.beta)


class ScalingLaw(Node):
    """Which size is best for so many FLOPs; `loss` is None where none is stated on its data."""

    name: str
    about: str
    source: str
    pivot_flops: float = 1.0
    pivot_params: float = 1.0
    exponent: float = 0.0
    exponent_range: tuple[float, float] | None = None
    loss: LossLaw | None = None

    @property
    def powers(self) -> tuple[float, float]:
        """(k, a) of N = k C^a; with a loss a = beta / (alpha + beta).

        Source: arXiv:2203.15556, equation 4: N = G (C / 6)^a, G = (alpha A / beta B)^(1 / (alpha +
        beta)).
        """
        if self.loss is None:
            return self.pivot_params / self.pivot_flops**self.exponent, self.exponent
        law, both = self.loss, self.loss.alpha + self.loss.beta
        power = law.beta / both
        return (law.alpha * law.a / law.beta / law.b) ** (1 / both) / _FLOPS**power, power

    def params(self, flops: float) -> float:
        """Parameters that are best for so many FLOPs."""
        factor, power = self.powers
        return float(factor * flops**power)

    def tokens_of(self, params: float) -> float:
        """Tokens for which so many parameters are best.

        >>> f"{law_named('twenty').tokens_of(70e9):.4g}"
        '1.4e+12'
        """
        factor, power = self.powers
        return float((params / factor) ** (1 / power) / (_FLOPS * params))

    def params_range(self, flops: float) -> tuple[float, float] | None:
        """As `params`, with the ends of the exponent's range, about the middle of its runs."""
        if self.exponent_range is None:
            return None
        params, (_, power) = self.params(flops), self.powers
        low, high = (
            params * (flops / _MIDDLE_FLOPS) ** (end - power) for end in self.exponent_range
        )
        return min(low, high), max(low, high)


@cache
def scaling_laws() -> Mapping[str, ScalingLaw]:
    """All laws, by name."""
    text = (files("twinstream.study.optimum") / "laws.toml").read_text(encoding="utf-8")
    found = {}
    for name, table in tomllib.loads(text).items():
        if "exponent_range" in table:
            table["exponent_range"] = tuple(table["exponent_range"])
        found[name] = ScalingLaw(name=name, **table)
    return found


def law_named(name: str) -> ScalingLaw:
    """One of the laws."""
    return scaling_laws()[name]


def flops_of(params: float, tokens: float) -> float:
    """C = 6 N D, as all laws count."""
    return _FLOPS * params * tokens


class LawAnswer(Node):
    """What a law says of so many FLOPs: size with its range, tokens, loss."""

    name: str
    about: str
    params: float
    params_low: float | None
    params_high: float | None
    tokens: float
    loss: float | None


def laws_at(flops: float) -> tuple[LawAnswer, ...]:
    """What each law says of so many FLOPs."""
    found = []
    for law in scaling_laws().values():
        params, (low, high) = law.params(flops), law.params_range(flops) or (None, None)
        tokens = flops / flops_of(params, 1.0)
        loss = None if law.loss is None else law.loss.loss(params, tokens)
        found.append(
            LawAnswer(name=law.name, about=law.about, params=params, params_low=low,
                      params_high=high, tokens=tokens, loss=loss)
        )  # fmt: skip
    return tuple(found)


def loss_range(params: float, tokens: float, error: float | None) -> tuple[float, float]:
    """The least and the most of the laws that state one, with tokens off by a speed's error."""
    losses = [law.loss for law in scaling_laws().values() if law.loss is not None]
    off = error or 0.0
    low = min(one.loss(params, tokens * (1 + off)) for one in losses)
    return low, max(one.loss(params, tokens * max(1 - off, 1e-3)) for one in losses)

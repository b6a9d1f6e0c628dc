"""The rules by which an optimizer updates parameters, and the numbers of state that each keeps."""

from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import Field

from twinstream.schedule.errors import TwinstreamError
from twinstream.schedule.python_file import OwnFunction, split_name

RuleName = Literal["adamw", "sgd", "lion", "muon"]
RULES: tuple[RuleName, ...] = get_args(RuleName)
MOST_STATES = 3  # of an element: as many have random bits of their own to be rounded by
# beta1 and beta2 of each rule where none are given: torch.optim's; Lion's paper (arXiv:2302.06675);
# Muon's as arXiv:2502.16982 has them.
BETAS: dict[str, tuple[float, float]] = {
    "adamw": (0.9, 0.999), "sgd": (0.9, 0.999), "lion": (0.9, 0.99), "muon": (0.95, 0.95),
}  # fmt: skip


class UpdateRuleError(TwinstreamError):
    """A rule that cannot be used."""


class OwnRule(OwnFunction):
    """A rule of a person's own, and how many numbers of state it keeps of each element."""

    num_states: Annotated[int, Field(ge=1, le=MOST_STATES)] = 1


UpdateRule = RuleName | OwnRule


def update_rule(text: str) -> UpdateRule:
    """A rule by its name, or by the file of one of your own: `FILE.py:FUNCTION[,states=2]`.

    >>> update_rule("lion")
    'lion'

    Raises:
        UpdateRuleError: there is none of that name, or the text is not of that form.
        DocumentError: the file cannot be read.
    """
    if text in RULES:
        return text
    name, _, told = text.partition(",")
    states = told.removeprefix("states=") if told else "1"
    if split_name(name) is None or (told and not told.startswith("states=")):
        raise UpdateRuleError(
            f"there is no optimizer '{text}': there are {', '.join(RULES)}, and your own as "
            "FILE.py:FUNCTION, or FILE.py:FUNCTION,states=2 where it keeps two numbers an element"
        )
    if states not in [str(count + 1) for count in range(MOST_STATES)]:
        raise UpdateRuleError(
            f"states={states} of an optimizer of your own: give 1 to {MOST_STATES} numbers an "
            "element"
        )
    return OwnRule.of(name, num_states=int(states))


def rule_text(rule: UpdateRule) -> str:
    """A rule as people write it.

    >>> rule_text("sgd")
    'SGD with momentum'
    """
    if isinstance(rule, OwnRule):
        return f"{rule.function} of {Path(rule.path).name}"
    return {"adamw": "AdamW", "sgd": "SGD with momentum", "lion": "Lion", "muon": "Muon"}[rule]


def states_of_element(rule: UpdateRule) -> int:
    """Numbers of state of each element; of Muon those of a matrix of a block."""
    if isinstance(rule, OwnRule):
        return rule.num_states
    return 2 if rule == "adamw" else 1

"""Colours: the same everywhere, told apart by colour-blind people too.

Task kinds have Okabe and Ito's colours (jfly.uni-koeln.de/color), tensor roles Paul Tol's muted
scheme (personal.sron.nl/~pault), so that a task is never taken for a tensor.
"""

from dataclasses import dataclass

TASK_COLOURS = {
    "block_forward": "#0072B2",
    "block_backward": "#D55E00",
    "block_recompute": "#E69F00",
    "head_loss": "#CC79A7",
    "embed_forward": "#56B4E9",
    "embed_backward": "#F0E442",
    "optimizer_step": "#009E73",
}
ROLE_COLOURS = {
    "parameter": "#44AA99",
    "gradient": "#882255",
    "optimizer_state": "#999933",
    "activation": "#88CCEE",
    "context": "#AA4499",
    "input": "#DDCC77",
    "loss": "#CC6677",
    "scratch": "#7F7F7F",
}
OTHER_COLOUR = "#8C8C8C"
WORLD_COLOURS = {"predicted": "#0072B2", "measured": "#E69F00"}
# Idle causes are queues (whose ops were waited for), or latency.
CAUSE_COLOURS = {
    "h2d": "#009E73",
    "d2h": "#D55E00",
    "h2d_inputs": "#56B4E9",
    "h2d_updates": "#56B4E9",
    "host": "#F0E442",
    "host_compute": "#CC79A7",
    "latency": "#8C8C8C",
}
# Of clusters: compute by phase as tasks are, what is said by axis; and what compute waits for.
PHASE_COLOURS = {
    "forward": "#0072B2",
    "backward": "#D55E00",
    "weight": "#CC79A7",
    "recompute": "#E69F00",
    "optimizer": "#009E73",
    "other": "#56B4E9",
}
AXIS_COLOURS = {
    "tp": "#332288",
    "cp": "#88CCEE",
    "ep": "#999933",
    "dp": "#AA4499",
    "all_ranks": "#882255",
    "transfer": "#44AA99",
    "bubble": "#C9CDD3",
    "late_ranks": "#CC6677",
    "copy": "#117733",
    "host": "#DDCC77",
    "latency": "#6E6E6E",
}
WAITING = "waiting"  # for the other sides of an exchange
_NAMES = {
    "transfer": "message of the pipeline",
    "weight": "gradients of weights",
    WAITING: "waits for the others",
}
_COLOURS = {WAITING: AXIS_COLOURS["bubble"], **TASK_COLOURS, **PHASE_COLOURS, **ROLE_COLOURS,
            **AXIS_COLOURS}  # fmt: skip
KEYS = tuple(_COLOURS)  # of bars: what comes later lies on top

# Of machines, models, lines: Okabe and Ito's, then two of Tol's that differ from them most.
SERIES_COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#8C8C8C", "#999933",
    "#AA4499",
)  # fmt: skip
_DASHES = ("solid", "dash", "dot", "dashdot")
_SYMBOLS = ("circle", "diamond", "square", "cross", "x", "triangle-up", "star")
_PATTERNS = ("", "/", "x", ".")


@dataclass(frozen=True)
class Series:
    """The look of one of many series; colours come again with another dash and pattern."""

    colour: str
    dash: str
    symbol: str
    pattern: str


def series(number: int) -> Series:
    """The look of a figure's series `number`; the first 36 all differ."""
    again, place = divmod(number, len(SERIES_COLOURS))
    return Series(
        SERIES_COLOURS[place],
        _DASHES[again % len(_DASHES)],
        _SYMBOLS[number % len(_SYMBOLS)],
        _PATTERNS[again % len(_PATTERNS)],
    )


def lighter(colour: str, share: float) -> str:
    """A colour mixed with so much white.

    >>> lighter("#0072B2", 0.0), lighter("#0072B2", 1.0)
    ('#0072b2', '#ffffff')
    """
    levels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(level + (255 - level) * share):02x}" for level in levels)


def key_colour(key: str) -> str:
    """Return the colour of a key: a kind of task, a phase, a tensor's role, an axis, a wait."""
    return _COLOURS.get(key, OTHER_COLOUR)


def key_name(key: str) -> str:
    """Return the words for a key, as a legend has them.

    >>> key_name("tp"), key_name("transfer"), key_name("weight"), key_name("block_forward")
    ('tp', 'message of the pipeline', 'gradients of weights', 'block forward')
    """
    return _NAMES.get(key, key.replace("_", " "))


def task_colour(kind: str) -> str:
    return TASK_COLOURS.get(kind.partition(" ")[0], OTHER_COLOUR)

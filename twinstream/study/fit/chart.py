"""Many models on many cards as one page: of each pair the fullest way to train that fits.

It needs no server: every cell has its figures and commands beside it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from twinstream.hardware_profiles.loader import load_machine
from twinstream.measures.metrics import rate_text
from twinstream.planner.planner import Planner
from twinstream.report.page import Page, Section, Table, html_of
from twinstream.schedule.sizes import gib
from twinstream.screens.tables import readable
from twinstream.study.fit.cells import (
    AskedCell,
    FitCell,
    FitQuestion,
    answered_cell,
    asked_cells,
    ways,
)
from twinstream.study.processes import answers_of

SEQ_LEN, TOKENS_PER_STEP = 4096, 16384
LADDER = ("full", "LoRA", "LoRA, base in nf4")
_SHORT = {"full": "", "LoRA": "LoRA", "LoRA, base in nf4": "nf4"}

_STYLE = """<style>
.chart { overflow: auto; max-height: 80vh; border: 1px solid var(--edge); border-radius: 8px; }
.chart table { width: auto; } .chart th, .chart td { padding: 3px 9px; white-space: nowrap; }
.chart thead th { position: sticky; top: 0; background: var(--paper); z-index: 1; }
.chart tbody th { position: sticky; left: 0; background: var(--paper); text-align: left; }
.chart td { text-align: right; cursor: pointer; } .chart small { color: var(--soft); }
.chart td.w1 { background: #0072b222; } .chart td.w2 { background: #e69f0030; }
.chart td.no { color: var(--soft); cursor: default; }
.chart td:focus, .chart td.on { outline: 2px solid #0072b2; outline-offset: -2px; }
#about { white-space: pre-wrap; min-height: 8.5em; margin-top: 10px; }
td:first-child { white-space: nowrap; }
</style>"""
_SCRIPT = """<script>"use strict";
document.querySelector(".chart").addEventListener("click", (event) => {
  const cell = event.target.closest("td[title]");
  if (!cell) return;
  document.querySelector("td.on")?.classList.remove("on");
  cell.classList.add("on");
  document.getElementById("about").textContent = cell.title;
});</script>"""


@dataclass(frozen=True)
class Chart:
    """The cells of every model, card by card."""

    cards: tuple[str, ...]
    rows: dict[str, tuple[FitCell, ...]]

    @property
    def html(self) -> str:
        """The cells as a table; a click on one shows what its title says."""
        head = "".join(f"<th>{escape(card)}</th>" for card in self.cards)
        body = "".join(
            f"<tr><th>{escape(model)}</th>{''.join(_cell_html(model, c) for c in cells)}</tr>"
            for model, cells in self.rows.items()
        )
        return (
            f'{_STYLE}<div class="chart"><table><thead><tr><th></th>{head}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>"
            f'<pre id="about">Click a cell.</pre>{_SCRIPT}'
        )


def chart(
    models: Sequence[str], cards: Sequence[str], *, seq_len: int = SEQ_LEN,
    tokens_per_step: int = TOKENS_PER_STEP, num_jobs: int = 1,
    on_cell: Callable[[FitCell], object] = lambda cell: None,
) -> Chart:  # fmt: skip
    """Plan, of every model on every card, ways from all weights to a base in few bits.

    A model that there is not is refused in its cells.

    Raises:
        TwinstreamError: there is no such card.
    """
    for card in cards:
        load_machine(card)
    ladders = []
    for model in models:
        question = FitQuestion(
            model, tuple(cards), lengths=(seq_len,), tokens_per_step=tokens_per_step
        )
        asked = [one for one in asked_cells(question, advises=False) if one.way.name in LADDER]
        ladders += [tuple(one for one in asked if one.machine == card) for card in cards]
    cells = answers_of(_fullest, ladders, num_jobs, on_cell)
    by_model = [cells[at : at + len(cards)] for at in range(0, len(cells), len(cards))]
    rows = {model: tuple(row) for model, row in zip(models, by_model, strict=True)}
    return Chart(tuple(cards), rows)


def _fullest(ladder: Sequence[AskedCell], planner: Planner) -> FitCell:
    """The first way that fits; where none does, the last that is not refused."""
    left: list[FitCell] = []
    for asked in ladder:
        cell = answered_cell(asked, planner)
        if cell.fits:
            return cell
        left.append(cell)
    return next((cell for cell in reversed(left) if not cell.refused), left[-1])


def _cell_html(model: str, cell: FitCell) -> str:
    if cell.tokens_per_s is None:
        return f'<td class=no title="{escape(_why_not(model, cell))}">-</td>'
    error = "?" if cell.error is None else f"{cell.error:.0%}"
    way = _SHORT[cell.way]
    return (
        f'<td class=w{LADDER.index(cell.way)} title="{escape(_about(model, cell))}">'
        f"{rate_text(cell.tokens_per_s)} <small>±{error}{' ' * bool(way)}{way}</small></td>"
    )


def _why_not(model: str, cell: FitCell) -> str:
    why = cell.refused or f"no way of {', '.join(LADDER)} fits its memories"
    return f"{model} on {cell.machine}: {why}.\n{cell.plan_command}"


def _about(model: str, cell: FitCell) -> str:
    """Say what a cell's figure is of, and the commands that give it and train so."""
    error = "not known" if cell.error is None else f"{cell.error:.1%} on average"
    speed = rate_text(cell.tokens_per_s or 0.0)
    mfu = "" if cell.mfu is None else f", MFU {cell.mfu:.0%}"
    limits = ", ".join(map(readable, cell.limits)) or "nothing"
    memory = f"{gib(cell.device_bytes or 0)} of device and {gib(cell.host_bytes or 0)} of host"
    return (
        f"{model} on {cell.machine}, {cell.way}: {speed} tokens/s{mfu}"
        f"; the prediction's error is {error}.\n{memory} memory; limited by {limits}.\n"
        f"{cell.kept_in}.\n"
        f"This figure:  {cell.plan_command}\nTrain so:     {cell.command}"
    )


def chart_html(found: Chart) -> str:
    """The page."""
    cells = [cell for row in found.rows.values() for cell in row]
    lengths = {(cell.seq_len, cell.tokens_per_step) for cell in cells}
    told = " or ".join(f"{n:,} tokens a sequence and {step:,} a step" for n, step in lengths)
    profiles = [load_machine(card) for card in found.cards]
    sections = [
        Section(
            "Tokens/s of one card, and how far off they may be",
            "All weights where they fit, by copying between device and host memory as need be; "
            "else LoRA (blue); else LoRA beside a base in nf4 (orange); - does not fit. A cell "
            "shows its way, memories, limit and commands.",
            found,
        ),
        Section(
            "Cards",
            "A range is the mean error of predictions with this profile where it could be tested, "
            "and no promise: cards hold other clocks, hosts other memories.",
            Table(
                ("card", "profile", "device memory", "host memory"),
                [
                    [one.name, one.description, gib(one.number("device_memory_bytes")),
                     gib(one.number("host_memory_bytes"))]
                    for one in profiles
                ],
                2,
            ),
        ),
        Section(
            "Ways", "",
            Table(("way", "flags"), [[w.name, w.flags or "-"] for w in ways() if w.name in LADDER],
                  2),
        ),
    ]  # fmt: skip
    fits = sum(cell.fits for cell in cells)
    return html_of(
        Page(
            "What can a card do with a model?",
            f"{len(found.rows)} models on {len(found.cards)} cards: {told}. {fits} of "
            f"{len(cells)} fit.",
            [], sections,
            "Made by make fit-page. Plans are quick ones; --effort normal gains a percent or two.",
        )
    )  # fmt: skip

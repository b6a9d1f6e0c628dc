"""The best sizes on the terminal and as a page, with utilisation over devices."""

from collections.abc import Sequence

import plotly.graph_objects as go
from rich.console import Group, RenderableType

from twinstream.report.page import Card, Page, Section, Table, Text, html_of
from twinstream.report.palette import SERIES_COLOURS
from twinstream.screens.layout_screen import money_text, range_text
from twinstream.screens.tables import listing_table
from twinstream.study.optimum.optimum import OptimumAnswer, SizedRun

_LAW_COLUMNS = ("law", "parameters (range)", "tokens", "loss", "of")
_COLUMNS = ("GPUs", "model", "layout", "parameters", "tokens", "MFU", "days", "GPU-hours", "money",
            "loss")  # fmt: skip


def optimum_screen(answer: OptimumAnswer) -> Group:
    """The best run on each number of GPUs, and what other laws say."""
    table, laws = listing_table(_COLUMNS[:3], _COLUMNS[3:]), listing_table(_LAW_COLUMNS, ())
    for row in _rows(answer.best):
        table.add_row(*row)
    for row in _law_rows(answer):
        laws.add_row(*row)
    parts: list[RenderableType] = [_title(answer), "", table, *_notes(answer)]
    if len(answer.tried) > len(answer.best):
        tried = listing_table(_COLUMNS[:3], _COLUMNS[3:])
        for row in _rows(answer.tried):
            tried.add_row(*row)
        parts += ["", "Tried", tried]
    return Group(*parts, "", f"All laws at {answer.best[0].flops:.4g} FLOPs", laws)


def optimum_html(answer: OptimumAnswer) -> str:
    """The same as a page; with several numbers of GPUs utilisation over them."""
    first = answer.best[0]
    cards = [
        Card("parameters", f"{first.params:.3g}", first.model),
        Card("tokens", f"{first.tokens:.3g}", f"{first.tokens / first.params:.1f} a parameter"),
        Card("MFU", f"{first.mfu:.1%}", first.layout),
        Card("days", f"{first.days:,.1f}", f"on {first.gpus:,} GPUs"),
    ]
    sections = [Section("The best", "", Table(_COLUMNS, _rows(answer.best), num_left=3))]
    if len(answer.best) > 1:
        about = "Bars are the error of the predicted speed."
        sections.insert(0, Section("Utilisation over GPUs", about, utilisation_figure(answer)))
    sections += [
        Section(
            "Laws",
            f"At {first.flops:.4g} FLOPs. {answer.law}: {answer.source}.",
            Table(_LAW_COLUMNS, _law_rows(answer), 5),
        ),
        Section("Notes", "", Text("\n".join(_notes(answer)))),
    ]
    return html_of(
        Page("The best size", _title(answer), cards, sections,
             "Made by twinstream optimum. Speeds are predictions of the simulator.")
    )  # fmt: skip


def utilisation_figure(answer: OptimumAnswer) -> go.Figure:
    """MFU and days over the number of GPUs."""
    runs = sorted(answer.best, key=lambda run: run.gpus)
    gpus = [run.gpus for run in runs]
    figure = go.Figure()
    figure.add_trace(
        go.Scatter(
            x=gpus, y=[100 * run.mfu for run in runs], mode="lines+markers", name="MFU",
            error_y={"type": "data", "array": [100 * run.mfu * (run.error or 0) for run in runs]},
            line={"color": SERIES_COLOURS[0]},
            text=[f"{run.model}, {run.layout}" for run in runs],
            hovertemplate="%{x:,} GPUs: %{y:.1f} %<br>%{text}<extra></extra>",
        )
    )  # fmt: skip
    figure.add_trace(
        go.Scatter(
            x=gpus, y=[run.days for run in runs], mode="lines+markers", name="days", yaxis="y2",
            line={"color": SERIES_COLOURS[1], "dash": "dash"}, marker={"symbol": "diamond"},
            hovertemplate="%{x:,} GPUs: %{y:,.1f} days<extra></extra>",
        )
    )  # fmt: skip
    figure.update_layout(
        height=440, margin={"l": 70, "r": 70, "t": 50, "b": 110},
        xaxis={"type": "log", "title": {"text": "GPUs"}, "tickvals": gpus,
               "ticktext": [f"{count:,}" for count in gpus]},
        yaxis={"title": {"text": "MFU, %"}, "rangemode": "tozero"},
        yaxis2={"title": {"text": "days"}, "overlaying": "y", "side": "right", "type": "log",
                "tickvals": [run.days for run in runs], "showgrid": False,
                "ticktext": [f"{run.days:,.3g}" for run in runs]},
        legend={"orientation": "h", "y": -0.25, "yanchor": "top"},
    )  # fmt: skip
    return figure


def _title(answer: OptimumAnswer) -> str:
    about = next(law.about for law in answer.laws if law.name == answer.law)
    return f"The best size on {answer.cluster} by the law {answer.law} ({about})"


def _rows(runs: Sequence[SizedRun]) -> list[list[str]]:
    return [
        [f"{run.gpus:,}", run.model, run.layout, f"{run.params / 1e9:,.4g}e9", f"{run.tokens:.4g}",
         f"{run.mfu:.1%}" + ("" if run.error is None else f" +/- {run.error:.0%}"),
         range_text(run.days, run.error, lambda days: f"{days:,.3g}"), f"{run.gpu_hours:,.0f}",
         "-" if run.money is None else money_text(run.money),
         f"{'' if run.loss is None else f'{run.loss:.3f} '}({run.loss_low:.2f} to "
         f"{run.loss_high:.2f})"]
        for run in runs
    ]  # fmt: skip


def _law_rows(answer: OptimumAnswer) -> list[list[str]]:
    rows = []
    for law in answer.laws:
        ends = "" if law.params_low is None else f" ({law.params_low:.3g} to {law.params_high:.3g})"
        loss = "-" if law.loss is None else f"{law.loss:.3f}"
        rows.append([law.name, f"{law.params:.3g}{ends}", f"{law.tokens:.3g}", loss, law.about])
    return rows


def _notes(answer: OptimumAnswer) -> list[str]:
    notes = []
    for gpus, (params, days) in answer.at_full_peak.items():
        notes.append(
            f"At 100 % of the peak of {gpus:,} GPUs the law would say {params:.4g} parameters, "
            f"which really take about {days:,.0f} days."
        )
    notes += [f"{gpus:,} GPUs: {why}" for gpus, why in answer.refused.items()]
    notes.append(
        "The range of the loss is over the laws that state one, with tokens off by the error of "
        "the speed; losses are of the laws' data, not of yours."
    )
    return notes

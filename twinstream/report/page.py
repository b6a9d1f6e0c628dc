"""One self-contained HTML page of cards, figures and tables; works offline."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any

import plotly.io
from plotly.basedatatypes import BaseFigure
from plotly.offline import get_plotlyjs

_SHORT = 12  # characters of a card's value that fit in large type
_ERROR = " +/- "  # of a value; what follows stands in small type beside it


@dataclass(frozen=True)
class Card:
    """A headline figure of a page: name, value and a note."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of text below column names; columns but the first `num_left` are numbers."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_left: int = 1

    @property
    def html(self) -> str:
        def cells(tag: str, values: Sequence[str]) -> str:
            return "".join(
                f"<{tag}{' class=number' if i >= self.num_left else ''}>{escape(value)}</{tag}>"
                for i, value in enumerate(values)
            )

        rows = "".join(f"<tr>{cells('td', row)}</tr>" for row in self.rows)
        head = f"<tr>{cells('th', self.columns)}</tr>"
        return f'<div class="table"><table>{head}{rows}</table></div>'


@dataclass(frozen=True)
class Text:
    """Lines as they are, in letters of one width."""

    text: str

    @property
    def html(self) -> str:
        return f"<pre>{escape(self.text)}</pre>"


@dataclass(frozen=True)
class Section:
    """A heading, a sentence or two, and a figure or a table; `half` ones stand side by side."""

    title: str
    text: str
    content: Any  # a plotly figure, what has `html`, or None: there is nothing but the text
    half: bool = False


@dataclass(frozen=True)
class Page:
    """The contents of a page, in order; `footer` says how it was made."""

    title: str
    subtitle: str
    cards: Sequence[Card]
    sections: Sequence[Section]
    footer: str


def html_of(page: Page) -> str:
    """The page as one HTML document: style, data and, where it has a figure, plotly.js inside."""
    cards = "".join(map(_card, page.cards))
    has_figure = any(isinstance(section.content, BaseFigure) for section in page.sections)
    plotly_js = f"<script>{get_plotlyjs()}</script>" if has_figure else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(page.title)}</title><style>{asset('page.css')}{asset('player.css')}</style>"
        f"{plotly_js}<script>{asset('player.js')}{asset('figures.js')}{asset('page.js')}</script>"
        "</head>\n<body>"
        f"<header><div><h1>{escape(page.title)}</h1><p>{escape(page.subtitle)}</p></div>"
        '<button id="theme" type="button">light / dark</button></header>'
        f'<div class="cards">{cards}</div>\n{_sections(page.sections)}\n'
        f"<footer>{escape(page.footer)}</footer></body></html>\n"
    )


def _card(card: Card) -> str:
    number, error = split_error(card.value)
    size = "value long" if len(number) > _SHORT else "value"
    beside = f' <span class="error">{escape(error)}</span>' if error else ""
    return (
        f'<div class="card"><div class="name">{escape(card.name)}</div>'
        f'<div class="{size}">{escape(number)}{beside}</div>'
        f'<div class="note">{escape(card.note)}</div></div>'
    )


def split_error(value: str) -> tuple[str, str]:
    """Split a value into the number, in large type, and its error, in small type beside it.

    >>> split_error("11,114 +/- 1.0 %")
    ('11,114', '+/- 1.0 %')
    """
    number, sign, error = value.partition(_ERROR)
    return number, f"{sign}{error}".strip()


def asset(name: str) -> str:
    return (files("twinstream.report") / "assets" / name).read_text(encoding="utf-8")


def _sections(sections: Sequence[Section]) -> str:
    parts: list[str] = []
    in_pair = False
    for number, section in enumerate(sections):
        if section.half != in_pair:
            parts.append('<div class="pair">' if section.half else "</div>")
            in_pair = section.half
        parts.append(
            f"<section><h2>{escape(section.title)}</h2><p>{escape(section.text)}</p>"
            f"{_content(section.content, number)}</section>"
        )
    return "\n".join(parts) + ("</div>" if in_pair else "")


def _content(content: Any, number: int) -> str:
    if content is None:
        return ""
    if not isinstance(content, BaseFigure):
        return str(content.html)
    name = f"figure{number}"
    # "</" inside the JSON would end the script; "<\/" is the same string to JSON.
    data = plotly.io.to_json(content, remove_uids=True).replace("</", "<\\/")
    return (
        f'<div id="{name}"></div>'
        f'<script type="application/json" data-figure="{name}">{data}</script>'
    )

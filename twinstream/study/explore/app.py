"""The explorer's page: controls write the URL, and the URL is answered."""

import errno
import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from dash import Dash, Input, Output, State, ctx, dcc, html, no_update
from flask import Response, request
from plotly.offline import get_plotlyjs
from werkzeug import serving

from twinstream.hardware_profiles.loader import load_machine
from twinstream.models.presets import load_model
from twinstream.planner.planner import gc_paused
from twinstream.report.page import asset
from twinstream.schedule.errors import TwinstreamError
from twinstream.study.answer import Answer
from twinstream.study.explore.answers import Answers, ExploreError, Refining, can_be_refined
from twinstream.study.explore.answers import State as Question
from twinstream.study.explore.clusters import ShownCluster, add_pages, clusters_part
from twinstream.study.explore.guard import guard
from twinstream.study.explore.show import (
    Found,
    column,
    compared,
    more_of,
    page_of,
    ranking_note,
    timeline_of,
)
from twinstream.study.values import CHOICES

_TEXTS = {
    "seq_len": "sequence length, tokens",
    "tokens_per_step": "tokens a step",
    "device_mem": "device memory",
    "host_mem": "host memory",
    "lora": "LoRA",
    "gpus": "GPUs of a cluster",
    "price": "price of a GPU-hour",
}
_CHOICES = {
    "policy": "policy", "effort": "effort", "optimizer_state": "optimizer state",
    "kernels": "kernels", "attention": "attention",
}  # fmt: skip
_SCRIPTS = {
    "/plotly.js": get_plotlyjs,
    "/player.js": lambda: asset("player.js"),
    "/figures.js": lambda: asset("figures.js"),
}
_STYLES = {"/player.css": lambda: asset("player.css")}
_ALWAYS = ("policy", "effort")  # have a value
_POLL_MS = 700
_MENU_PX = 560
_HINTS = {
    "device_mem": "all", "host_mem": "all", "lora": "r=16", "tokens_per_step": "open",
    "gpus": "64", "price": "h100=2.5",
}  # fmt: skip
_CONTROLS = tuple(field.name for field in fields(Question))


def explorer(
    answers: Answers, clusters: Sequence[ShownCluster] = (), host: str = "127.0.0.1"
) -> Dash:
    """The page as a Dash app; everything it needs is served from here, at `host`.

    Schedules of clusters are shown below, as they are.
    """
    app = Dash(
        "twinstream", title="twinstream explore", assets_folder=_assets(), update_title="",
        external_scripts=list(_SCRIPTS), external_stylesheets=list(_STYLES),
        meta_tags=[{"name": "viewport", "content": "width=device-width, initial-scale=1"}],
    )  # fmt: skip
    for path, content in (_SCRIPTS | _STYLES).items():
        app.server.add_url_rule(path, path, _served(content, path))
    guard(app, host)
    app.layout = _layout(answers, clusters)
    add_pages(app, clusters)

    @app.callback(
        [Output(name, "value") for name in _CONTROLS],
        Output("url", "search"),
        [Input(name, "value") for name in _CONTROLS],
        Input("url", "search"),
    )
    def follow(*values: Any) -> tuple[Any, ...]:
        """A new URL sets the controls; a changed control makes a new URL."""
        *controls, search = values
        if ctx.triggered_id in (None, "url"):
            state = answers.new_page.at_url(search)
            shown = (*vars(state).values(),)
            return (shown[0], list(state.machine_names), *shown[2:], no_update)
        texts = [",".join(map(str, v)) if isinstance(v, list) else str(v or "") for v in controls]
        state = Question(*texts)
        return (*[no_update] * len(_CONTROLS), state.url)

    _add_answers(app, answers)

    def report() -> Response:
        state = answers.new_page.at_url(request.query_string.decode())
        found = answers.answer(state, request.args.get("machine", ""))
        if isinstance(found, TwinstreamError):
            return Response(f"error: {found}\n", status=400, mimetype="text/plain")
        return Response(page_of(found), mimetype="text/html")

    app.server.add_url_rule("/report", view_func=report)
    return app


def serve(  # noqa: PLR0913
    models: Sequence[str | Path], machines: Sequence[str | Path],
    shown: Sequence[ShownCluster] = (), *, host: str, port: int, price: str = "",
    on_ready: Callable[[str], None] = lambda url: None,
) -> None:  # fmt: skip
    """Serve the page until Ctrl-C; `on_ready` gets its address.

    Args:
        models: files that it offers, too; so are the machines.
        shown: schedules of clusters, below the plans.
        price: of an hour of one GPU, or of each machine or cluster; a new page begins with it.

    Raises:
        ExploreError: the address is taken, or not this machine's; the price is none.
    """
    if (fault := Question(price=price).price_fault) is not None:
        raise ExploreError(f"--{fault}")
    machine_files = {load_machine(path).name: str(path) for path in machines}
    # each question says how long its sequences are
    model_files = {load_model(path, longest=1).name: str(path) for path in models}
    try:
        with socket.create_server((host, port)):
            pass
    except OSError as error:
        # Python appends the address to what the system says.
        why = str(error.strerror or error).partition(" (while")[0]
        option = "--port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
        raise ExploreError(
            f"cannot serve at {host}:{port}: {why}; choose another {option}"
        ) from None
    app = explorer(Answers(model_files, machine_files, price=price), shown, host)
    on_ready(f"http://{host}:{port}/")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # not a line for every request
    serving.run_simple(host, port, app.server, threaded=True)


def _add_answers(app: Dash, answers: Answers) -> None:
    """The numbers and the figures follow the URL, and plans that are refined meanwhile."""
    refining = Refining(answers)

    @app.callback(
        Output("answers", "children"),
        Output("answered", "data"),
        Output("poll", "disabled"),
        Input("url", "search"),
        Input("poll", "n_intervals"),
        State("answered", "data"),
    )
    def answered(search: str | None, _: int | None, before: object) -> tuple[object, ...]:
        """The numbers; the figures, which take longer to draw, follow them, and better plans."""
        asked = answers.new_page.at_url(search)
        found = _shown(answers, refining, asked, anew=ctx.triggered_id != "poll")
        told = [asked.url, [one.machine for one in found if one.is_refined]]
        done = not any(one.is_being_refined for one in found)
        if told == before:
            return no_update, no_update, done
        return _answers(answers, found), told, done

    @app.callback(
        Output("figures", "children"), Input("answered", "data"), prevent_initial_call=True
    )
    def drawn(told: object) -> list[html.Div]:
        url = told[0] if isinstance(told, list) and told else None
        return _figures(_shown(answers, refining, answers.new_page.at_url(url), anew=False))


def _shown(answers: Answers, refining: Refining, asked: Question, *, anew: bool) -> list[Found]:
    """The best answer that is known for each machine; quick ones are planned if need be."""
    first = {machine: answers.answer(asked, machine) for machine in asked.machine_names}
    better = asked.refined
    if better is None:
        return [Found(machine, asked, found) for machine, found in first.items()]
    refining.follow([(better, name) for name in first if can_be_refined(first[name])], anew=anew)
    shown = []
    for machine, found in first.items():
        normal = answers.kept(better, machine)
        if normal is None:
            left = can_be_refined(found)
            shown.append(Found(machine, asked, found, is_being_refined=left))
        else:
            shown.append(Found(machine, better, normal, is_refined=True))
    return shown


def _answers(answers: Answers, shown: Sequence[Found]) -> list[Any]:
    if not shown:
        return [html.Div("Choose a machine.")]
    columns = [column(one, len(shown), answers.command(one.asked, one.machine)) for one in shown]
    note = ranking_note(shown)
    return [
        *compared(shown),
        *([html.P(note, id="order")] if note else []),
        html.Div(columns, className="machines"),
    ]


def _figures(shown: Sequence[Found]) -> list[html.Div]:
    plans = {one.machine: one.answer for one in shown if isinstance(one.answer, Answer)}
    if not plans:
        return []
    with gc_paused():
        return [more_of(plans), *(timeline_of(machine, one) for machine, one in plans.items())]


def _served(content: Callable[[], str], path: str) -> Callable[[], Response]:
    kind = "css" if path.endswith(".css") else "javascript"
    return lambda: Response(content(), mimetype=f"text/{kind}")


def _assets() -> str:
    return str(files("twinstream.study.explore") / "assets")


def _layout(answers: Answers, clusters: Sequence[ShownCluster]) -> html.Div:
    controls = [
        _control("model", _dropdown("model", answers.models)),
        _control(
            "machines",
            dcc.Dropdown(answers.machines, id="machines", multi=True, maxHeight=_MENU_PX),
        ),
        *(
            _control(
                label,
                dcc.Input(
                    id=name, debounce=True, className="text", placeholder=_HINTS.get(name, "")
                ),
            )
            for name, label in _TEXTS.items()
        ),
        *(
            _control(label, _dropdown(name, _choices(name), clearable=name not in _ALWAYS))
            for name, label in _CHOICES.items()
        ),
    ]
    return html.Div(
        [
            dcc.Location(id="url", refresh="callback-nav"),
            html.H1("How fast would it train, and what should I buy?"),
            html.Div(controls, className="controls"),
            dcc.Store(id="answered"),
            dcc.Interval(id="poll", interval=_POLL_MS, disabled=True),
            dcc.Loading(html.Div(id="answers"), delay_show=400, type="dot"),
            html.Div(id="figures"),
            clusters_part(clusters),
        ]
    )


def _choices(name: str) -> list[str]:
    """Those of a query of one device: Megatron's kernels are priced on clusters alone."""
    return [one for one in CHOICES[name] if one != "megatron"]


def _dropdown(name: str, options: Sequence[str], *, clearable: bool = False) -> dcc.Dropdown:
    return dcc.Dropdown(list(options), id=name, clearable=clearable, maxHeight=_MENU_PX)


def _control(label: str, control: Any) -> html.Div:
    return html.Div([html.Label(label), control], className="control")

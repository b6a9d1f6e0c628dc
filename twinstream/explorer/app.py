"""The explorer's page: controls write the URL, and the URL is answered."""

from importlib.resources import files
from typing import Any

from dash import Dash, Input, Output, ctx, dcc, html, no_update
from flask import Response, request

from twinstream.explorer.answers import Answer, Answers
from twinstream.explorer.show import column, more_of, ranking_note, timeline_of
from twinstream.explorer.state import State
from twinstream.planner.choices import EFFORTS
from twinstream.planner.step_plan import gc_paused, policy_names
from twinstream.report.report import report_html
from twinstream.schedule.errors import TwinstreamError

_TEXTS = {
    "seq_len": "sequence length, tokens",
    "tokens_per_step": "tokens a step",
    "device_mem": "device memory",
    "host_mem": "host memory",
}
_CONTROLS = ("model", "machines", *_TEXTS, "policy", "effort")


def explorer(answers: Answers) -> Dash:
    """The page as a Dash app; everything it needs is served from here."""
    app = Dash("twinstream", title="twinstream explore", assets_folder=_assets(), update_title="")
    app.layout = _layout(answers)

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
            state = State.of_url(search)
            shown = (*vars(state).values(),)
            return (shown[0], list(state.machine_names), *shown[2:], no_update)
        texts = [",".join(v) if isinstance(v, list) else str(v or "") for v in controls]
        state = State(*texts)
        return (*[no_update] * len(_CONTROLS), state.url)

    @app.callback(Output("answers", "children"), Output("answered", "data"), Input("url", "search"))
    def answered(search: str | None) -> tuple[html.Div, str]:
        """The numbers; the figures, which take longer to draw, follow them."""
        state = State.of_url(search)
        return _columns(answers, state), state.url

    @app.callback(
        Output("figures", "children"), Input("answered", "data"), prevent_initial_call=True
    )
    def drawn(search: str) -> list[html.Div]:
        return _figures(answers, State.of_url(search))

    def report() -> Response:
        state = State.of_url(request.query_string.decode())
        found = answers.answer(state, request.args.get("machine", ""))
        if isinstance(found, TwinstreamError):
            return Response(f"error: {found}\n", status=400, mimetype="text/plain")
        page = report_html(found.schedule, found.machine, predicted=found.timeline)
        return Response(page, mimetype="text/html")

    app.server.add_url_rule("/report", view_func=report)
    return app


def _columns(answers: Answers, state: State) -> html.Div:
    found = {name: answers.answer(state, name) for name in state.machine_names}
    columns = [
        column(state, name, answer, answers.command(state, name)) for name, answer in found.items()
    ]
    note = ranking_note({name: one for name, one in found.items() if isinstance(one, Answer)})
    shown = html.Div(columns or "Choose a machine.", className="machines")
    return html.Div([shown, *([html.P(note, id="order")] if note else [])])


def _figures(answers: Answers, state: State) -> list[html.Div]:
    found = {machine: answers.answer(state, machine) for machine in state.machine_names}
    plans = {machine: one for machine, one in found.items() if isinstance(one, Answer)}
    if not plans:
        return []
    with gc_paused():
        return [more_of(plans), *(timeline_of(machine, one) for machine, one in plans.items())]


def _assets() -> str:
    return str(files("twinstream.explorer") / "assets")


def _layout(answers: Answers) -> html.Div:
    controls = [
        _control("model", dcc.Dropdown(answers.models, id="model", clearable=False)),
        _control("machines", dcc.Dropdown(answers.machines, id="machines", multi=True)),
        *(
            _control(label, dcc.Input(id=name, debounce=True, className="text"))
            for name, label in _TEXTS.items()
        ),
        _control("policy", dcc.Dropdown(list(policy_names()), id="policy", clearable=False)),
        _control("effort", dcc.Dropdown(list(EFFORTS), id="effort", clearable=False)),
    ]
    return html.Div(
        [
            dcc.Location(id="url", refresh="callback-nav"),
            html.H1("How fast would it train, and what should I buy?"),
            html.Div(controls, className="controls"),
            dcc.Store(id="answered"),
            dcc.Loading(html.Div(id="answers"), delay_show=400, type="dot"),
            html.Div(id="figures"),
        ]
    )


def _control(label: str, control: Any) -> html.Div:
    return html.Div([html.Label(label), control], className="control")

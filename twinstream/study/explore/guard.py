"""Who may ask the explorer, and what: pages of other sites may not, nor may broken requests."""

import ipaddress
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from dash import Dash
from dash.exceptions import DashException
from flask import Response, request

from twinstream.schedule.errors import TwinstreamError

_CALLBACKS = "/_dash-update-component"
_FRAMES = {"X-Frame-Options": "DENY", "Content-Security-Policy": "frame-ancestors 'none'"}


def guard(app: Dash, host: str) -> None:
    """Refuse requests that a page of another site sends (403), and broken ones (400).

    A name that another site has pointed at this machine (DNS rebinding) is not ours: Host has to be
    `host`, an address, or a name of this machine.

    Args:
        host: where the page is served.
    """
    names = {host, "localhost", socket.gethostname().lower()}

    def checked() -> Response | None:
        name = _name_of(f"//{request.host}")
        if name not in names and not _is_address(name):
            return _refused(403, f"'{request.host[:80]}' is no name of this machine")
        if _is_of_another_site():
            return _refused(403, "a page of another site asks")
        if request.path == _CALLBACKS and not _is_callback(_asked(), app.callback_map):
            return _refused(400, "this is no callback of the page")
        return None

    def unframed(response: Response) -> Response:
        response.headers.update(_FRAMES)
        return response

    def broken(error: Exception) -> Response:
        return _refused(400, str(error))

    app.server.before_request(checked)
    app.server.after_request(unframed)
    app.server.register_error_handler(TwinstreamError, broken)
    app.server.register_error_handler(DashException, broken)


def _asked() -> Any:
    """The request's JSON; None of what is none, or is nested deeper than Python reads."""
    try:
        return request.get_json(silent=True)
    except RecursionError:
        return None


def _refused(status: int, why: str) -> Response:
    return Response(f"error: {why}\n", status=status, mimetype="text/plain")


def _name_of(url: str) -> str:
    """Its host; "" of what is no URL."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_of_another_site() -> bool:
    """By Origin, or where there is none by Fetch Metadata; a link to the page may be anywhere."""
    headers = request.headers
    if (origin := headers.get("Origin")) is not None:
        return origin not in (f"http://{request.host}", f"https://{request.host}")
    is_link = (headers.get("Sec-Fetch-Mode"), headers.get("Sec-Fetch-Dest")) == (
        "navigate", "document",
    )  # fmt: skip
    return headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin") and not is_link


def _is_callback(body: Any, known: Mapping[str, Any]) -> bool:
    """Whether a request names a callback of the page, and gives it what it takes."""
    if not isinstance(body, dict) or not isinstance(body.get("output"), str):
        return False
    callback, changed = known.get(body["output"]), body.get("changedPropIds", [])
    if callback is None or not isinstance(changed, list):
        return False
    outputs = body.get("outputs", [])
    outputs = outputs if isinstance(outputs, list) else [outputs]
    return (
        all(isinstance(one, str) for one in changed)
        and _properties(outputs) is not None
        and all(
            _properties(body.get(n, [])) == _properties(callback[n]) for n in ("inputs", "state")
        )
    )


def _properties(given: Any) -> list[tuple[str, str]] | None:
    """Of which part of the page each is; None where one says no such thing."""
    if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
        return None
    found = [(one.get("id"), one.get("property")) for one in given]
    return found if all(isinstance(name, str) for one in found for name in one) else None

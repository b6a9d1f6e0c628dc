"""A command's help: its usual options by panel, a line or two each; all of them on demand."""

import shutil
from collections.abc import Sequence
from textwrap import fill, wrap
from typing import Any

from twinstream.options.option_group import PANELS

HELP_ALL = "--help-all"
_MOST_COLUMNS = 100
_NAMES = 28  # columns of an option's names
_OWN = "Options"  # the panel of what has none


def help_text(command: Any, path: str, takes: Sequence[str], *, whole: bool) -> str:
    """
    Args:
        path: the command as it is called.
        takes: its arguments, in a word each.
        whole: whether rare options are shown, too.
    """
    width = min(shutil.get_terminal_size().columns, _MOST_COLUMNS)
    told = [" ".join(part.split()) for part in (command.help or "").split("\n\n")]
    parts = [
        fill(" ".join(["Usage:", path, *takes]), width),
        *(fill(part, width) for part in told if part),
    ]
    shown = [one for one in command.params if whole or not getattr(one, "hidden", False)]
    for title, options in _by_panel(shown):
        rows = [line for option in options for line in _row(option, width)]
        parts.append("\n".join([f"{title}:", *rows]))
    if left := len(command.params) - len(shown):
        parts.append(fill(f"{left} more options: {path} {HELP_ALL}", width))
    return "\n\n".join(parts)


def _by_panel(params: Sequence[Any]) -> list[tuple[str, list[Any]]]:
    """Arguments say what they are in the usage; panels of groups are in their order."""
    found: dict[str, list[Any]] = {}
    for one in params:
        if one.param_type_name == "option":
            found.setdefault(getattr(one, "rich_help_panel", None) or _OWN, []).append(one)
    order = {name: place for place, name in enumerate(PANELS)} | {_OWN: len(PANELS) + 1}
    return sorted(found.items(), key=lambda item: order.get(item[0], len(PANELS)))


def _row(option: Any, width: int) -> list[str]:
    names = ", ".join(option.opts)
    if option.secondary_opts:
        off = option.secondary_opts[0]
        names = f"--[no-]{off.removeprefix('--no-')}" if option.opts else off
    if option.metavar and not option.is_flag:
        names += f" {option.metavar}"
    told = option.help or ""
    default = option.default
    if option.show_default and default not in (None, False, (), "") and not callable(default):
        told += f" Default: {default}."
    told += " Required." if option.required else ""
    lines = wrap(told, max(20, width - _NAMES - 2)) or [""]
    if len(names) + 4 > _NAMES:
        return [f"  {names}", *(f"{'':{_NAMES}}{line}" for line in lines)]
    return [f"{'  ' + names:{_NAMES}}{lines[0]}", *(f"{'':{_NAMES}}{one}" for one in lines[1:])]

"""Chat templates: found as Hugging Face stores them, and rendered as transformers does."""

import importlib.util
import json
import pickle
import re
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from twinstream.data.data_error import DataError
from twinstream.data.encoding.conversation import Message
from twinstream.data.encoding.tokenizer import read_settings, read_utf8

Span = tuple[int, int]

_MORE = "additional_chat_templates"  # a folder
_RENDERER = Path(__file__).with_name("renderer.py")


class TemplateLimitError(DataError):
    """A template that is stopped, as it takes too much of something."""


@dataclass(frozen=True)
class TemplateSources:
    """Templates as texts: that of every conversation, and another of those with tools."""

    default: str
    for_tools: str | None = None


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, and the characters inside `{% generation %}`."""

    text: str
    generated: tuple[Span, ...] = ()


@dataclass
class ChatTemplate:
    """A template; `marks_generation` where it says itself what the assistant says.

    `for_tools` renders conversations with tools in its place.

    It is somebody's program, so that it runs in a process of its own, which is started with the
    first conversation and stopped where a rendering takes more CPU time or memory than this.
    """

    source: str
    named_tokens: Mapping[str, str]
    today: date
    cpu_seconds: float = 10.0
    memory_bytes: int = 1 << 30
    for_tools: "ChatTemplate | None" = None
    marks_generation: bool = field(init=False)
    _renderer: "_Renderer | None" = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.marks_generation = bool(re.search(r"\{%-?\+?\s*generation\b", self.source))

    def of(self, tools: object) -> "ChatTemplate":
        """The one that renders conversations with these tools."""
        return self if tools is None or self.for_tools is None else self.for_tools

    def render(
        self,
        messages: Sequence[Message],
        tools: object = None,
        *,
        count: int | None = None,
        prompts: bool = False,
    ) -> Rendered:
        """The first `count` messages, or all; `prompts` adds what makes the assistant speak next.

        Raises:
            DataError: the template refuses the messages, in its own words, or is stopped.
        """
        if (other := self.of(tools)) is not self:
            return other.render(messages, tools, count=count, prompts=prompts)
        if self._renderer is None:
            self._renderer = _Renderer(self)
        try:
            return self._renderer.render(messages, tools, count, prompts)
        except (EOFError, OSError):
            status = self._renderer.close()
            self._renderer = None
            raise self._ended(status) from None

    def _ended(self, status: int | None) -> TemplateLimitError:
        if status == -signal.SIGXCPU:
            return TemplateLimitError(
                f"the chat template runs for more than {self.cpu_seconds:g} s of CPU time on one "
                "conversation; take another (--chat-template)"
            )
        return TemplateLimitError(
            f"the process that renders the chat template ended (status {status}), probably because "
            "memory ran out"
        )


class _Renderer:
    """The process with a template, which ends with this object."""

    def __init__(self, template: ChatTemplate) -> None:
        if importlib.util.find_spec("jinja2") is None:
            raise DataError(
                "chat templates need the package `jinja2`, which is not installed: pip install "
                "jinja2"
            )
        self._connection, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_RENDERER), str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self.close = weakref.finalize(self, _end, self._process, self._connection)
        limits = (template.cpu_seconds, template.memory_bytes)
        self._sent: tuple[object, object] = (None, None)
        first = (template.source, dict(template.named_tokens), template.today, limits)
        self._connection.send_bytes(pickle.dumps(first))

    def render(
        self, messages: Sequence[Message], tools: object, count: int | None, prompts: bool
    ) -> Rendered:
        """Raises EOFError or OSError if the process has ended."""
        if self._sent[0] is not messages or self._sent[1] is not tools:
            self._connection.send_bytes(pickle.dumps(("messages", list(messages), tools)))
            self._sent = (messages, tools)
        self._connection.send_bytes(pickle.dumps(("render", count, prompts)))
        match json.loads(self._connection.recv_bytes()):
            case [str(text), list(spans)]:
                return Rendered(text, tuple((start, end) for start, end in spans))
            case [str(problem)]:
                raise DataError(f"the chat template {problem}")
        raise AssertionError("an answer is a text with its ranges, or a problem")


def _end(process: "subprocess.Popen[bytes]", connection: Connection) -> int:
    connection.close()
    process.kill()
    return process.wait()


def find_template(tokenizer: Path | None, given: Path | None) -> TemplateSources | None:
    """Return the templates of a file, or of a tokenizer's folder as transformers finds them: its
    files of templates, else those in its config, else the one of its processor.

    Raises:
        DataError: a file cannot be read, or there are several and none is named default.
    """
    if given is not None:
        return TemplateSources(read_utf8(given))
    if tokenizer is None:
        return None
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    file = folder / "chat_template.jinja"
    by_name = {path.stem: read_utf8(path) for path in sorted(folder.glob(f"{_MORE}/*.jinja"))}
    if file.exists():
        by_name["default"] = read_utf8(file)
    where = folder / _MORE
    if not by_name:
        where = folder / "tokenizer_config.json"
        by_name = _named(where, read_settings(folder).get("chat_template"))
    if not by_name and (legacy := folder / "chat_template.json").exists():
        where, by_name = legacy, _named(legacy, _read_json(legacy).get("chat_template"))
    if not by_name:
        return None
    if "default" not in by_name:
        raise DataError(
            f"{where} has chat templates named {', '.join(by_name)} but none named default; give "
            "one as a file (--chat-template)"
        )
    return TemplateSources(by_name["default"], by_name.get("tool_use"))


def _named(where: Path, value: object) -> dict[str, str]:
    """Templates by their names, of a config's value: one, a list or an object."""
    match value:
        case None | "":
            return {}
        case str(source):
            return {"default": source}
        case dict(named):
            found = named
        case list(listed) if all(isinstance(one, dict) for one in listed):
            found = {one.get("name"): one.get("template") for one in listed}
        case _:
            found = {"default": None}
    if wrong := [name for name, source in found.items() if not isinstance(source, str)]:
        raise DataError(f"{where} has a chat template '{wrong[0]}' that is no text")
    return {str(name): str(source) for name, source in found.items()}


def _read_json(path: Path) -> dict[str, object]:
    try:
        found = json.loads(read_utf8(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not valid JSON: {error}") from None
    return found if isinstance(found, dict) else {}

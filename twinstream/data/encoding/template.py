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

_RENDERER = Path(__file__).with_name("renderer.py")


class TemplateLimitError(DataError):
    """A template that is stopped, as it takes too much of something."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, and the characters inside `{% generation %}`."""

    text: str
    generated: tuple[Span, ...] = ()


@dataclass
class ChatTemplate:
    """A template; `marks_generation` where it says itself what the assistant says.

    It is somebody's program, so that it runs in a process of its own, which is started with the
    first conversation and stopped where a rendering takes more CPU time or memory than this.
    """

    source: str
    named_tokens: Mapping[str, str]
    today: date
    cpu_seconds: float = 10.0
    memory_bytes: int = 1 << 30
    marks_generation: bool = field(init=False)
    _renderer: "_Renderer | None" = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.marks_generation = bool(re.search(r"\{%-?\+?\s*generation\b", self.source))

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


def find_template(tokenizer: Path | None, given: Path | None) -> str | None:
    """Of the given file, of chat_template.jinja in the tokenizer's folder, or its config."""
    if given is not None:
        return read_utf8(given)
    if tokenizer is None:
        return None
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    if (path := folder / "chat_template.jinja").exists():
        return read_utf8(path)
    match read_settings(folder).get("chat_template"):
        case str(source):
            return source
        case list(named):
            by_name = {one.get("name"): one.get("template") for one in named}
            if isinstance(default := by_name.get("default"), str):
                return default
            raise DataError(
                f"{folder / 'tokenizer_config.json'} has chat templates named "
                f"{', '.join(map(str, by_name))} but none named default; give one as a file"
            )
    return None

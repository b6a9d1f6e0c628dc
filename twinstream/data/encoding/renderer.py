"""Renders one chat template: a program for a process of its own, with limits.

It is run by its path and imports nothing of the package, so that it starts quickly. `template.py`
starts it with the number of a file descriptor, and sends what it is to do:

    (source, named_tokens, today, limits)   once
    ("messages", messages, tools)
    ("render", count, prompts)              of the first messages

Only the last is answered, in JSON: a text and the ranges of characters that `{% generation %}`
encloses, or what the template does instead, in a sentence without its subject.
"""

import json
import pickle
import re
import resource
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import date, datetime, time
from math import ceil
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

# A conversation of 40 MB may take longer and more than others.
_CPU_SECONDS_PER_BYTE = 1e-6
_MEMORY_BYTES_PER_BYTE = 64
# A template that writes more has lost count: tokenising it would take minutes a conversation.
_CHARACTERS, _CHARACTERS_PER_BYTE = 1 << 20, 64

# Two code points that Unicode keeps free for uses inside a program; they mark what is generated.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"


class _Refused(Exception):
    """What the template does instead."""


def serve(connection: Connection) -> None:
    """Render the chats that the other side of a pipe sends, until that is closed."""
    source, named, today, limits = pickle.loads(connection.recv_bytes())
    template: Any = None
    messages: list[Any] = []
    tools, size_bytes = None, 0
    while True:
        received = connection.recv_bytes()
        request = pickle.loads(received)
        if request[0] == "messages":
            _, messages, tools = request
            size_bytes = len(received)
            continue
        _, count, prompts = request
        try:
            _limit(size_bytes, *limits)
            if template is None:
                template = _compile(source, today)
            answer = _rendered(template, named, messages[:count], tools, prompts)
            _require_length(answer[0], size_bytes)
            content = json.dumps(answer).encode()
        except Exception as error:  # a template is a program: it raises whatever it likes
            content = json.dumps([_problem(error, limits[1])]).encode()
        connection.send_bytes(content)


def _limit(size_bytes: int, cpu_s: float, memory_bytes: int) -> None:
    """CPU time and memory from here on, more of both for a conversation of this size."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s += used.ru_utime + used.ru_stime + size_bytes * _CPU_SECONDS_PER_BYTE
    memory_bytes += size_bytes * _MEMORY_BYTES_PER_BYTE
    for kind, limit in ((resource.RLIMIT_CPU, ceil(cpu_s)), (resource.RLIMIT_AS, memory_bytes)):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (limit if hard < 0 else min(limit, hard), hard))


def _require_length(text: str, size_bytes: int) -> None:
    most = _CHARACTERS + size_bytes * _CHARACTERS_PER_BYTE
    if len(text) > most:
        raise _Refused(
            f"writes {len(text):,} characters for a conversation of {size_bytes:,} bytes, of which "
            f"{most:,} are allowed: take another (--chat-template)"
        )


def _problem(error: Exception, memory_bytes: int) -> str:
    match error:
        case _Refused():
            return str(error)
        case MemoryError():
            return f"takes more than {memory_bytes / 2**30:.2g} GiB of memory"
        case RecursionError():
            return "nests too deeply"
        case jinja2.TemplateSyntaxError():
            return f"is no Jinja: line {error.lineno}: {error}"
    return f"fails: {str(error) or type(error).__name__}"


def _rendered(
    template: Any, named: Mapping[str, str], messages: list[Any], tools: object, prompts: bool
) -> tuple[str, list[tuple[int, int]]]:
    """A text, and the characters inside `{% generation %}`."""
    marked = template.render(
        messages=messages, tools=tools, documents=None, add_generation_prompt=prompts, **named
    )
    if _OPEN not in marked and _CLOSE not in marked:
        return marked, []
    pieces = re.split(f"({_OPEN}|{_CLOSE})", marked)
    texts, marks = pieces[::2], pieces[1::2]
    if marks != [_OPEN, _CLOSE] * (len(marks) // 2):
        raise _Refused(
            "has {% generation %} within {% generation %}, or the conversation has the characters "
            "U+FDD0 or U+FDD1, which stand for nothing: take them out"
        )
    edges, length = [], 0
    for text in texts[:-1]:
        length += len(text)
        edges.append(length)
    return "".join(texts), list(zip(edges[::2], edges[1::2], strict=True))


def _compile(source: str, today: date) -> Any:
    class Generation(jinja2.ext.Extension):
        """`{% generation %}...{% endgeneration %}` puts marks around what it encloses."""

        tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body)
            return call.set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return f"{_OPEN}{caller()}{_CLOSE}"

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = datetime.combine(today, time()).strftime
    return environment.from_string(source)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the training's, which ends this
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the other side has gone
        serve(Connection(int(sys.argv[1])))

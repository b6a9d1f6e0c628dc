"""Chat templates: found as Hugging Face stores them, and rendered as transformers does."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, time
from pathlib import Path
from typing import Any, NoReturn

from twinstream.data.data_error import DataError
from twinstream.data.encoding.tokenizer import read_settings, read_utf8

Message = Mapping[str, Any]
Span = tuple[int, int]

# Two code points that Unicode keeps free for uses inside a program; they mark what is generated.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, and the characters inside `{% generation %}`."""

    text: str
    generated: tuple[Span, ...] = ()


@dataclass
class ChatTemplate:
    """A compiled template; `marks_generation` where it says itself what the assistant says."""

    source: str
    named_tokens: Mapping[str, str]
    today: date
    marks_generation: bool = field(init=False)

    def __post_init__(self) -> None:
        self.marks_generation = bool(re.search(r"\{%-?\+?\s*generation\b", self.source))
        self._template = _compile(self.source, self.today)

    def render(
        self, messages: Sequence[Message], tools: object = None, *, prompts: bool = False
    ) -> Rendered:
        """All of a conversation; `prompts` adds what makes the assistant speak next.

        Raises:
            DataError: the template refuses the messages, in its own words.
        """
        try:
            marked = self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=prompts,
                **self.named_tokens,
            )
        except Exception as error:  # a template is a program: it raises whatever it likes
            raise DataError(f"the chat template fails: {error or type(error).__name__}") from None
        return _unmarked(marked)


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


def _compile(source: str, today: date) -> Any:
    try:
        import jinja2
        import jinja2.ext
        import jinja2.nodes
        import jinja2.sandbox
    except ModuleNotFoundError:
        raise DataError(
            "chat templates need the package `jinja2`, which is not installed: pip install jinja2"
        ) from None

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
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise DataError(f"the chat template is no Jinja: line {error.lineno}: {error}") from None


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


def _unmarked(marked: str) -> Rendered:
    if _OPEN not in marked and _CLOSE not in marked:
        return Rendered(marked)
    pieces = re.split(f"({_OPEN}|{_CLOSE})", marked)
    texts, marks = pieces[::2], pieces[1::2]
    if marks != [_OPEN, _CLOSE] * (len(marks) // 2):
        raise DataError(
            "the conversation has the characters U+FDD0 or U+FDD1, which stand for nothing, or "
            "the chat template has {% generation %} within {% generation %}: take them out"
        )
    edges, length = [], 0
    for text in texts[:-1]:
        length += len(text)
        edges.append(length)
    return Rendered("".join(texts), tuple(zip(edges[::2], edges[1::2], strict=True)))

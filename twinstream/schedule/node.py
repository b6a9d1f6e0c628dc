"""The base of every document node, nodes whose fields are options of a command, and what a notebook
shows of a node: small tables in HTML, without script or style sheet.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, ClassVar, Self, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import SchemaValidator, core_schema

from twinstream.schedule.errors import ArgumentError

_MOST_ROWS = 30
_FEWEST_OF_A_MESH = 2  # fields by which a file, be it damaged, is a mesh's
_STYLE = "text-align:left;padding:2px 12px 2px 0"
_set_fields, _set_names, _set_extra, _set_private = (
    BaseModel.__dict__[slot].__set__
    for slot in (
        "__dict__",
        "__pydantic_fields_set__",
        "__pydantic_extra__",
        "__pydantic_private__",
    )
)


class Node(BaseModel):
    """Immutable, no unknown fields, no silent coercion."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    _names: ClassVar[set[str]]

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        cls._names = set(cls.model_fields)

    @classmethod
    def made(cls, **fields: Any) -> Self:
        """A node of fields that are right by construction, all of them: nothing is looked at.

        For the hundred thousands of nodes of a large document; a sixth of `model_construct`'s time.
        """
        return cls._with_fields(fields)

    @classmethod
    def made_of(cls, node: "Node", **fields: Any) -> Self:
        """The same of another node's fields, with these in place of its own or beside them."""
        known = vars(node).copy()
        known.update(fields)
        return cls._with_fields(known)

    @classmethod
    def _with_fields(cls, fields: dict[str, Any]) -> Self:
        node = object.__new__(cls)
        _set_fields(node, fields)
        _set_names(node, cls._names)
        _set_extra(node, None)
        _set_private(node, None)
        return node


class MeshDocument(Node):
    """A document about all ranks of a mesh; in files one device's is that of its rank alone."""

    rank_kind: ClassVar[type[Node]] = Node
    _mesh_fields: ClassVar[SchemaValidator]

    @classmethod
    def of_rank(cls, rank: Any) -> Self:
        """Return the document of one device from what its rank has."""
        raise NotImplementedError

    @property
    def is_one_device(self) -> bool:
        """Whether it is one device's alone."""
        raise NotImplementedError

    @property
    def only(self) -> Node:
        """What the one device has."""
        raise NotImplementedError

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with other fields; of one device those that its rank's document has."""
        if update and self.is_one_device and update.keys() <= self.rank_kind.model_fields.keys():
            return self.of_rank(self.only.model_copy(update=update, deep=deep))
        return super().model_copy(update=update, deep=deep)

    def model_dump_json(self, **settings: Any) -> str:
        """Return the text of its file."""
        if self.is_one_device:
            return self.only.model_dump_json(**settings)
        return super().model_dump_json(**settings)

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **settings: Any) -> Self:
        """Read one device's file, or that of a mesh, which has fields that no rank's has.

        Raises:
            ValidationError: what is wrong with it.
        """
        try:
            found: dict[str, Any] = cls._mesh_fields.validate_json(json_data)
        except ValidationError:  # it is no object at all: the reader below says so
            found = {}
        if len(found) >= _FEWEST_OF_A_MESH:
            return super().model_validate_json(json_data, **settings)
        return cls.of_rank(cls.rank_kind.model_validate_json(json_data, **settings))

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        # which fields there are, without making anything of them: objects are read as empty ones
        empty = core_schema.typed_dict_schema({})
        kinds = [empty, core_schema.list_schema(empty), core_schema.str_schema()]
        some = core_schema.union_schema([*kinds, core_schema.float_schema()])
        field = core_schema.with_default_schema(some, on_error="omit")
        names = cls.model_fields.keys() - cls.rank_kind.model_fields.keys()
        fields = {name: core_schema.typed_dict_field(field, required=False) for name in names}
        cls._mesh_fields = SchemaValidator(core_schema.typed_dict_schema(fields))


_Kind = TypeVar("_Kind", bound=Node)


def option(what: str, *names: str, unit: str | None = None, **limits: Any) -> Any:
    """A field that is an option with this help, by these names or else its own."""
    alias = AliasChoices(*names) if names else None
    return Field(description=what, validation_alias=alias, title=unit, **limits)


def size(what: str, *names: str) -> Any:
    """A whole number above 0."""
    return option(what, *names, unit="N", gt=0, le=2**40)


def quantity(what: str, unit: str, *names: str, **limits: float) -> Any:
    """A finite number, not negative unless the limits say otherwise."""
    limits = limits if "gt" in limits else {"ge": 0, **limits}
    return option(what, *names, unit=unit, allow_inf_nan=False, **{"le": 1e30, **limits})


def flags_of(kind: type[Node], field: str) -> list[str]:
    """The names of a field's option."""
    named = kind.model_fields.get(field)
    alias = named and named.validation_alias
    names = alias.choices if isinstance(alias, AliasChoices) else [field]
    return [f"--{str(name).replace('_', '-')}" for name in names]


def from_options(
    kind: type[_Kind], given: Mapping[str, object], called: Mapping[str, str] | None = None
) -> _Kind:
    """A node of the options that were given.

    Args:
        called: how users know a field, where it is not the field of an option itself.

    Raises:
        ArgumentError: says which option is wrong, and what it needs.
    """
    try:
        return kind.model_validate(dict(given))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        flag = (called or {}).get(field) or flags_of(kind, field)[0]
        raise ArgumentError(f"{flag} {_why(first)}") from None


def _why(error: Any) -> str:
    """What is wrong with a value."""
    if error["type"] == "literal_error":
        known = error["ctx"]["expected"].replace("'", "").replace(" or ", ", ")
        return f"{error['input']!r:.60} is unknown; known: {known}"
    told = error["msg"].replace("Input should be", "needs to be")
    told = told.replace("greater than or equal to", "at least")
    told = told.replace("less than or equal to", "at most")
    return f"{told}, got {error['input']!r:.60}"


def facts_html(title: str, facts: Mapping[str, object]) -> str:
    """A title and what is known, a line each.

    >>> facts_html("a < b", {"step": "1 s"}).count("<tr>")
    1
    """
    rows = "".join(
        f'<tr><th style="{_STYLE}">{escape(name)}</th><td style="{_STYLE}">{escape(str(value))}'
        "</td></tr>"
        for name, value in facts.items()
    )
    return f"<div><b>{escape(title)}</b><table>{rows}</table></div>"


def records_html(title: str, records: Sequence[Mapping[str, object]]) -> str:
    """A title and the first rows of a table, columns in the order of the first row."""
    shown = records[:_MOST_ROWS]
    columns = list(dict.fromkeys(name for record in shown for name in record))
    head = "".join(f'<th style="{_STYLE}">{escape(name)}</th>' for name in columns)
    rows = "".join(
        "<tr>"
        + "".join(f'<td style="{_STYLE}">{_cell(record.get(name))}</td>' for name in columns)
        + "</tr>"
        for record in shown
    )
    left = len(records) - len(shown)
    more = f"<p>{left:,} more rows: twinstream.frame has them all.</p>" if left else ""
    return f"<div><b>{escape(title)}</b><table><tr>{head}</tr>{rows}</table>{more}</div>"


def _cell(value: object) -> str:
    if value is None:
        return ""
    return escape(f"{value:.6g}" if isinstance(value, float) else str(value))

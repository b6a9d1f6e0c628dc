"""Groups of options: nodes whose fields are flags of commands and keys of TOML files alike."""

from pathlib import Path
from typing import Any, get_args

from pydantic import ConfigDict, Field, ValidationInfo, field_validator
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

from twinstream.schedule.node import Node
from twinstream.schedule.sizes import parse_number

# The panels of a command's help, in the order in which it shows them.
WHERE = "Where"
TRAINED = "What is trained"
DATA = "Data"
STEPS = "Steps"
OPTIMIZER = "Optimizer"
MEMORY = "Memory and plan"
SEVERAL = "Several GPUs"
FIXED = "What to fix of a plan by optimal"
RUN = "Run"
PANELS = (WHERE, TRAINED, DATA, STEPS, OPTIMIZER, MEMORY, SEVERAL, FIXED, RUN)


def flag(
    panel: str, unit: str, what: str, default: Any = None, *, rare: bool = False, **limits: Any
) -> Any:
    """A field that is an option.

    Args:
        panel: of the help.
        unit: what stands for its value in the help.
        what: the help.
        rare: whether the help shows it only with `--help-all`.
    """
    extra: JsonDict = {"panel": panel, "rare": rare}
    return Field(default, description=what, title=unit, json_schema_extra=extra, **limits)


def same_flag(
    group: type["OptionGroup"], name: str, default: Any = None, **limits: Any
) -> Any:  # fmt: skip
    """Declare the option of another group here, too, perhaps with another default."""
    field = group.model_fields[name]
    return Field(
        default, description=field.description, title=field.title,
        json_schema_extra=field.json_schema_extra, **limits,
    )  # fmt: skip


class OptionGroup(Node):
    """Options, None where one is open; texts are read as numbers where a number is asked for.

    The description of each field is the help of its flag: `device_mem` is `--device-mem`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)

    def given(self) -> list[str]:
        """The flags that were given, in the order of their declaration."""
        return [
            flag_of(name)
            for name in type(self).model_fields
            if name in self.model_fields_set and getattr(self, name) not in (None, False, ())
        ]

    @field_validator("*", mode="before")
    @classmethod
    def _numbers_as_written(cls, value: Any, info: ValidationInfo) -> Any:
        """`2k` of a number, as flags are read."""
        kind = cls.model_fields[str(info.field_name)].annotation
        kinds = {kind, *get_args(kind)}
        if not isinstance(value, str) or not kinds & {int, float} or kinds & {str, Path}:
            return value
        number = parse_number(value)
        return value if number is None else number

    @field_validator("*")
    @classmethod
    def _no_null_byte(cls, value: Any) -> Any:
        if "\0" in "".join(map(str, value if isinstance(value, tuple) else [value])):
            raise PydanticCustomError("null_byte", "no name has a null byte")
        return value


def flag_of(name: str) -> str:
    """
    >>> flag_of("device_mem")
    '--device-mem'
    """
    return f"--{name.replace('_', '-')}"

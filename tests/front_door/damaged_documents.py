"""Documents with one value damaged, as files get it: out of range, of another kind, gone."""

import copy
import json
import random
import tomllib
from collections.abc import Iterator
from typing import Any

_VALUES = (
    *(0, -1, 1, 3, 2**31, 2**53 + 1, 2**63, 2**64, 10**25, 10**400),
    *(0.0, -0.5, 1e-300, 1e26, 1e300, "", "nobody", "compute", None, True, [], {}),
)


def places(document: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every value."""
    found: list[tuple[Any, Any]] = []
    todo = [document]
    while todo:
        inside = todo.pop()
        keys = inside.keys() if isinstance(inside, dict) else range(len(inside))
        for key in keys:
            found.append((inside, key))
            if isinstance(inside[key], dict | list):
                todo.append(inside[key])
    return found


def damaged(document: Any, number: int, seed: int) -> Iterator[tuple[str, Any]]:
    """(what was done, a copy with that damage), all kinds of places alike."""
    draw = random.Random(seed)
    for _ in range(number):
        mine = copy.deepcopy(document)
        by_key: dict[str, list[tuple[Any, Any]]] = {}
        for inside, key in places(mine):
            name = key if isinstance(key, str) else f"item of {type(inside[key]).__name__}"
            by_key.setdefault(name, []).append((inside, key))
        inside, key = draw.choice(by_key[draw.choice(sorted(by_key))])
        before = inside[key]
        match draw.randrange(4):
            case 0 if isinstance(inside, dict):
                del inside[key]
                told = "gone"
            case 1 if isinstance(before, int | float) and not isinstance(before, bool):
                inside[key] = draw.choice((-before, before * 10**6, before + 1, before * 1e18))
                told = repr(inside[key])
            case 2 if isinstance(inside, list) and len(inside) > 1:
                other = draw.randrange(len(inside))
                inside[key], inside[other] = inside[other], inside[key]
                told = f"exchanged with {other}"
            case _:
                inside[key] = draw.choice(_VALUES)
                told = repr(inside[key])[:40]
        yield f"{key}: {told}", mine


def as_toml(document: dict[str, Any]) -> str:
    """Enough TOML for a profile: values of JSON are values of TOML, but for null and exponents."""
    lines = []
    for key, value in document.items():
        if value is not None:
            lines.append(f"{json.dumps(key)} = {_toml(value)}")
    text = "\n".join(lines)
    tomllib.loads(text)
    return text


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items() if v is not None)
            + "}"
        )
    if isinstance(value, list):
        return "[" + ", ".join(_toml(v) for v in value if v is not None) + "]"
    return json.dumps(value)

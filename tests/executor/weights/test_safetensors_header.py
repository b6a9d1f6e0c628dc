"""Damaged safetensors are refused where the library that defines the format refuses them."""

import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError, safe_open

from twinstream.executor.weights.errors import WeightsError
from twinstream.executor.weights.safetensors_header import read_header


def tensor(begin: int, end: int, dtype: str = "F32", shape: Any = None) -> dict[str, Any]:
    return {
        "dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape,
        "data_offsets": [begin, end],
    }  # fmt: skip


PAIR = {"a": tensor(0, 8), "b": tensor(8, 20)}


def written(path: Path, header: object, num_bytes: int, *, length: int = 0, pad: int = 0) -> Path:
    """A file with this header, announced `length` longer than it is, and `num_bytes` of data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode() + b" " * pad
    path.write_bytes(struct.pack("<Q", len(text) + length) + text + bytes(num_bytes))
    return path


def library_reads(path: Path) -> bool:
    try:
        with safe_open(path, "pt"):
            return True
    except SafetensorError:
        return False


def we_read(path: Path) -> bool:
    try:
        read_header(path)
    except WeightsError as error:
        assert "fetch it again" in str(error) and "\n" not in str(error)
        return False
    return True


READ = {
    "two tensors": (PAIR, 20, {}),
    "in another order": ({"b": tensor(8, 20), "a": tensor(0, 8)}, 20, {}),
    "a padded header": (PAIR, 20, {"pad": 4}),
    "nothing": ({}, 0, {}),
    "empty tensors": (PAIR | {"c": tensor(20, 20), "d": tensor(8, 8, shape=[0, 3])}, 20, {}),
    "a number": ({"a": tensor(0, 4, shape=[])}, 4, {}),
    "metadata": (PAIR | {"__metadata__": {"format": "pt"}}, 20, {}),
    "metadata of nothing": (PAIR | {"__metadata__": None}, 20, {}),
    "other dtypes": ({"a": tensor(0, 8, "I64", [1]), "b": tensor(8, 9, "F4", [2])}, 9, {}),
}
REFUSED = {
    "trailing bytes": (PAIR, 21, {}),
    "trailing bytes of nothing": ({}, 3, {}),
    "a missing byte": (PAIR, 19, {}),
    "a hole": ({"a": tensor(0, 8), "b": tensor(12, 20)}, 20, {}),
    "a hole at the beginning": ({"b": tensor(12, 20)}, 20, {}),
    "an overlap": ({"a": tensor(0, 8), "b": tensor(4, 20)}, 20, {}),
    "the same bytes": ({"a": tensor(0, 20), "b": tensor(0, 20)}, 20, {}),
    "an empty one inside": ({"a": tensor(0, 8), "b": tensor(4, 4)}, 8, {}),
    "a header a byte short": (PAIR, 20, {"pad": 8, "length": -1}),
    "a header a word short": (PAIR, 20, {"pad": 8, "length": -8}),
    "a header too long": (PAIR, 20, {"length": 4}),
    "metadata of numbers": (PAIR | {"__metadata__": {"a": 1}}, 20, {}),
    "metadata of a list": (PAIR | {"__metadata__": ["a"]}, 20, {}),
    "metadata twice": (b'{"__metadata__":{},"__metadata__":{}}', 0, {}),
    "a field twice": (b'{"a":{"dtype":"I8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}', 1, {}),
    "an unknown dtype": ({"a": tensor(0, 8, "Q9")}, 8, {}),
    "too few bytes of a dtype that is not ours": ({"a": tensor(0, 8, "I64", [2])}, 8, {}),
    "a truth value in a shape": ({"a": tensor(0, 4, shape=[True])}, 4, {}),
    "a truth value for a place": ({"a": tensor(False, 4, shape=[1])}, 4, {}),
    "half an element": ({"a": tensor(0, 4, shape=[1.0])}, 4, {}),
    "no JSON number": (PAIR | {"c": tensor(20, 20) | {"d": float("nan")}}, 20, {}),
    "a byte order mark": (b"\xef\xbb\xbf{}", 0, {}),
    "two bytes a character": ("{}".encode("utf-16"), 0, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", [*READ, *REFUSED])
def test_what_the_library_refuses_is_refused(name: str, tmp_path: Path) -> None:
    header, num_bytes, more = (READ | REFUSED)[name]
    path = written(tmp_path / "a.safetensors", header, num_bytes, **more)
    assert library_reads(path) == we_read(path) == (name in READ)


def test_random_damage_is_judged_as_the_library_judges_it(tmp_path: Path) -> None:
    rng, read = random.Random(1), 0
    for number in range(400):
        sizes = [rng.choice((0, 4, 8, 12)) for _ in range(4)]
        ends = [sum(sizes[: i + 1]) for i in range(4)]
        header = {f"t{i}": tensor(ends[i] - sizes[i], ends[i]) for i in range(4)}
        if rng.random() < 0.8:
            one = header[rng.choice(list(header))]
            one["data_offsets"][rng.randrange(2)] += rng.choice((-4, -2, 4))
            if rng.random() < 0.5:  # whole again, or moved as a whole
                begin = one["data_offsets"][0] if rng.random() < 0.5 else rng.choice(ends)
                one["data_offsets"] = [begin, begin + 4 * one["shape"][0]]
        extra = rng.choice((0, 0, 0, 1, 4, -1)) if ends[-1] else 0
        path = written(tmp_path / f"{number}.safetensors", header, ends[-1] + extra)
        assert library_reads(path) == we_read(path), (header, extra)
        read += we_read(path)
    assert 20 < read < 380


def test_a_name_twice_is_refused_though_the_library_takes_the_last(tmp_path: Path) -> None:
    """The format forbids it; which of the two a reader means is open."""
    one = b'{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
    path = written(tmp_path / "a.safetensors", b'{"a":' + one + b',"\\u0061":' + one + b"}", 8)
    with pytest.raises(WeightsError, match="'a' stands there twice"):
        read_header(path)

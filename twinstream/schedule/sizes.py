"""Sizes in bytes, counts and prices as people write them."""

import re

from twinstream.schedule.errors import TwinstreamError, require

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base ** (power + 1)
    for suffix, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGT")
}
_LONGEST = 40
_FEW_BYTES = 1024  # a bare number below that is a slip
_MOST_BYTES = 2**60
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(%|[A-Za-z]*)\s*")


_MULTIPLES = {"": 1, "k": 1024, "m": 1e6, "b": 1e9, "t": 1e12}
_NUMBER = re.compile(
    r"[$\u20ac\u00a3]?\s*"
    r"([+-]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9][0-9_]*)?(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?)"
    r"\s*([kmbt]?)",
    re.IGNORECASE,
)


def parse_number(text: str) -> float | int | None:
    """A count or a price: `2k` (2,048), `64,128`, `1e12`, `15T`, `$2.50`; None where it is none.

    k is 1,024, as lengths are told; M, B and T are 1e6, 1e9 and 1e12, as tokens of runs are.

    >>> parse_number("2k"), parse_number("15T"), parse_number("$2.50"), parse_number("64,128")
    (2048, 15000000000000, 2.5, 64128)
    >>> parse_number("1e12"), parse_number("2x"), parse_number("64,12")
    (1000000000000, None, None)
    """
    match = _NUMBER.fullmatch(text.strip()) if len(text) <= _LONGEST else None
    if match is None:
        return None
    try:
        number = float(match[1].replace(",", "").replace("_", ""))
    except ValueError:
        return None
    exact = match[1].replace(",", "").replace("_", "")
    if exact.isdecimal() and not match[2]:
        return int(exact)  # beyond 2**53, too
    number *= _MULTIPLES[match[2].lower()]
    return int(number) if number.is_integer() else number


class SizeError(TwinstreamError):
    """A size that cannot be read."""


def parse_bytes(text: str, *, whole_bytes: float | None = None) -> int:
    """Bytes of `24GiB`, `80GB`, `512MiB`, `80%` (of `whole_bytes`) or a plain number.

    GiB is 2**30 bytes, GB is 1e9. Raises SizeError with what is understood.

    >>> parse_bytes("24GiB"), parse_bytes("50%", whole_bytes=1000)
    (25769803776, 500)
    """
    require("a size", text, str)
    match = _SIZE.fullmatch(text) if len(text) <= _LONGEST else None
    if match is None or (match[2] != "%" and match[2] not in _UNITS):
        shown = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
        raise SizeError(f"cannot read the size '{shown}'; write it as 24GiB, 80GB, 80% or in bytes")
    if match[2] == "" and "." not in match[1] and 0 < int(match[1]) < _FEW_BYTES:
        raise SizeError(f"'{text}' is so many bytes; write {text}GiB, or {text}B if that is meant")
    if match[2] != "%":
        return int(float(match[1]) * _UNITS[match[2]])
    if whole_bytes is None:
        raise SizeError(
            f"'{text}' is a share of a memory whose size the machine's profile does not state; "
            "give it in GiB"
        )
    return int(whole_bytes * float(match[1]) / 100)


def whole_bytes_of(name: str, number: int) -> int:
    """A cap that was given as a number; one of a few bytes is a slip, 0 is meant.

    Raises:
        SizeError: says what to write.
    """
    require(name, number, int)
    if number < 0 or 0 < number < _FEW_BYTES or number > _MOST_BYTES:
        raise SizeError(
            f"{name}={number} is so many bytes; write '{abs(number)}GiB' in quotes, or a number of "
            f"bytes from {_FEW_BYTES} to 2**60"
        )
    return number


def brief(size_bytes: int) -> str:
    """Format a size for narrow columns, in two digits: `5.1 MiB`, `64 KiB`, `4 B`.

    >>> brief(5 * 2**20), brief(640 * 2**10), brief(4)
    ('5.0 MiB', '640 KiB', '4 B')
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= size:
            return f"{size_bytes / size:.{int(size_bytes < 10 * size)}f} {unit}"
    return f"{size_bytes} B"


def as_cap(size_bytes: int) -> str:
    """A cap to type that is never less: in hundredths of a GiB, small ones in whole MiB.

    >>> as_cap(20 * 2**30 + 1), as_cap(5 * 2**20), as_cap(5 * 2**20 + 1)
    ('20.01GiB', '5MiB', '6MiB')
    """
    if size_bytes < 2**30:
        return f"{-(-size_bytes // 2**20)}MiB"
    return f"{-(-size_bytes * 100 // 2**30) / 100:.2f}GiB"


def gib(size_bytes: float) -> str:
    """Format a size for people: `12.34 GiB`, small sizes in MiB or KiB.

    >>> gib(2**33), gib(3 * 2**20), gib(2048)
    ('8.00 GiB', '3.00 MiB', '2.00 KiB')
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if abs(size_bytes) >= size:
            return f"{size_bytes / size:.2f} {unit}"
    return f"{size_bytes / 2**10:.2f} KiB"


def rate_text(per_s: float) -> str:
    """Tokens a second for people: whole ones, two digits where there are few.

    >>> rate_text(11234.5), rate_text(0.0123)
    ('11,234', '0.012')
    """
    return f"{per_s:,.0f}" if per_s >= 10 else f"{per_s:.2g}"

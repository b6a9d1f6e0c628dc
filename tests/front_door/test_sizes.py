"""Sizes as people write them."""

import pytest

from twinstream.schedule.sizes import SizeError, brief, gib, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("24GiB", 24 * 2**30),
        ("1.5GiB", 3 * 2**29),
        ("80GB", 80_000_000_000),
        ("512MiB", 2**29),
        ("512MB", 512_000_000),
        ("4KiB", 4096),
        ("2TiB", 2**41),
        ("1TB", 10**12),
        ("25769803776", 25_769_803_776),
        ("100B", 100),
        (" 24 GiB ", 24 * 2**30),
        ("0", 0),
    ],
)
def test_binary_and_decimal_units_are_told_apart(text, expected):
    assert parse_bytes(text) == expected


def test_a_share_is_of_the_whole():
    assert parse_bytes("80%", whole_bytes=1000.0) == 800
    assert parse_bytes("12.5%", whole_bytes=16) == 2


def test_a_share_of_an_unknown_memory_is_refused():
    with pytest.raises(SizeError, match="does not state"):
        parse_bytes("80%")


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1GiB", "1gib", "1 GiB 2", "1e3GiB", "24G", "1,5GiB", "%", "inf", "nanGiB"]
)
def test_what_is_no_size_is_refused_with_an_example(text):
    with pytest.raises(SizeError, match="24GiB"):
        parse_bytes(text)


def test_people_read_gibibytes():
    assert gib(24 * 2**30) == "24.00 GiB"
    assert gib(2**20) == "1.00 MiB"
    assert gib(1536) == "1.50 KiB"


def test_narrow_columns_have_two_digits_and_a_unit_that_fits():
    sizes = (4, 2048, 10 * 2**10 - 1, 640 * 2**10, 3 * 2**19, 2**40)
    shown = ["4 B", "2.0 KiB", "10.0 KiB", "640 KiB", "1.5 MiB", "1024 GiB"]
    assert [brief(size) for size in sizes] == shown

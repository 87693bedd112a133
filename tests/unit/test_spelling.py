"""The one spelling of decimals, date-times and dates."""

from collections.abc import Callable
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decideonce_server import spelling

MANY_DIGITS = "1234567890" * 4


@pytest.mark.parametrize(
    ("expected", "texts"),
    [
        ("10", ["10", "10.0", "10.00", "+10", "0010", "+010.000"]),
        ("-10.5", ["-10.5", "-10.50", "-010.5"]),
        ("0", ["0", "-0", "+0", "0.00", "-0.0", "000"]),
        ("0.001", ["0.001", "00.0010", "+0.001"]),
        ("100", ["100", "100.0"]),
        (f"{MANY_DIGITS}.{MANY_DIGITS[:-1]}", [f"{MANY_DIGITS}.{MANY_DIGITS}"]),
    ],
)
def test_decimals_have_one_spelling(expected: str, texts: list[str]) -> None:
    """Sign, leading and trailing zeros make no other number, and no digit is rounded."""
    assert {expected} == {spelling.decimal_spelling(text) for text in texts}


@pytest.mark.parametrize(
    "text", ["", "+", "-", ".5", "5.", "1e5", "1,5", " 1", "1\n", "1_000", "٣", "NaN", "Infinity", "--1", "1" * 101]
)
def test_what_is_no_decimal_is_refused(text: str) -> None:
    """Exponents, blanks, foreign digits, open fractions and endless numbers are no decimals."""
    with pytest.raises(ValueError, match="decimal"):
        spelling.decimal_spelling(text)


@given(st.from_regex(r"[+-]?[0-9]{1,20}(\.[0-9]{1,20})?", fullmatch=True, alphabet=st.characters(codec="ascii")))
def test_spelling_keeps_the_number(text: str) -> None:
    """The spelling is the same number, and its own spelling."""
    spelled = spelling.decimal_spelling(text)
    assert Decimal(text) == Decimal(spelled)
    assert spelled == spelling.decimal_spelling(spelled)


@pytest.mark.parametrize(
    ("expected", "texts"),
    [
        (
            "2026-01-01T00:00:00Z",
            [
                "2026-01-01T00:00:00Z",
                "2026-01-01t00:00:00z",
                "2026-01-01T00:00:00.000Z",
                "2026-01-01T00:00:00-00:00",
                "2026-01-01T09:00:00+09:00",
                "2025-12-31T19:30:00-04:30",
            ],
        ),
        ("2026-01-01T00:00:00.5Z", ["2026-01-01T00:00:00.500Z", "2026-01-01T05:30:00.5+05:30"]),
        (f"2026-01-01T00:00:00.{MANY_DIGITS[:-1]}Z", [f"2026-01-01T00:00:00.{MANY_DIGITS}Z"]),
        ("2016-12-31T23:59:60.25Z", ["2016-12-31T23:59:60.250Z", "2017-01-01T08:59:60.25+09:00"]),
        ("1990-12-31T23:59:60Z", ["1990-12-31T15:59:60-08:00"]),
        ("0001-01-01T00:00:00Z", ["0001-01-01T00:00:00Z", "0001-01-01T01:00:00+01:00"]),
        ("9999-12-31T23:59:59Z", ["9999-12-31T23:59:59Z", "9999-12-31T22:59:59-01:00"]),
    ],
)
def test_moments_have_one_spelling(expected: str, texts: list[str]) -> None:
    """Offset, letters' case and trailing zeros make no other moment, and no digit is lost (RFC 3339)."""
    assert {expected} == {spelling.date_time_spelling(text) for text in texts}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "2026-01-01",
        "2026-01-01 00:00:00Z",
        "2026-01-01T00:00:00",
        "2026-01-01T00:00Z",
        "2026-01-01T00:00:00.Z",
        "2026-01-01T00:00:00,5Z",
        "2026-01-01T24:00:00Z",
        "2026-01-01T00:60:00Z",
        "2026-01-01T00:00:61Z",
        "2026-01-01T00:00:60Z",
        "2016-12-31T23:59:60+01:00",
        "2026-02-29T00:00:00Z",
        "2026-13-01T00:00:00Z",
        "0000-01-01T00:00:00Z",
        "0001-01-01T00:00:00+00:01",
        "9999-12-31T23:59:59-00:01",
        "2026-01-01T00:00:00+24:00",
        "2026-01-01T00:00:00+00:60",
        "2026-01-01T00:00:00+0900",
        "2026-01-01T00:00:00Z\n",
        "٢026-01-01T00:00:00Z",
        "20260101T000000Z",
        "2026-W01-1T00:00:00Z",
    ],
)
def test_what_is_no_moment_is_refused(text: str) -> None:
    """What RFC 3339 doesn't take, or lies outside the years 0001 to 9999 in UTC, is no date-time."""
    with pytest.raises(ValueError, match=r"."):
        spelling.date_time_spelling(text)


def test_date_has_its_own_spelling() -> None:
    """A date is spelled as it is given."""
    assert "2024-02-29" == spelling.date_spelling("2024-02-29")


@pytest.mark.parametrize("text", ["", "2026-1-1", "20260101", "2026-W01-1", "2026-02-29", "0000-01-01", "2026-01-01\n"])
def test_what_is_no_date_is_refused(text: str) -> None:
    """Other forms of ISO 8601 and days that never were are no dates."""
    with pytest.raises(ValueError, match=r"."):
        spelling.date_spelling(text)


@pytest.mark.parametrize(
    ("name", "text"), [("decimal", "1.0"), ("date-time", "2026-01-01T00:00:00Z"), ("date", "2026-01-01")]
)
def test_checks_agree_with_spellings(name: str, text: str) -> None:
    """A format's check takes what can be spelled, and nothing else."""
    check: Callable[[str], bool] = spelling.CHECKS[name]
    assert (True, False) == (check(text), check("x"))

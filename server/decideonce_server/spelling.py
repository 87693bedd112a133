"""Texts that can be spelled in several ways, and the one spelling that a fingerprint is made of.

`FORMATS` maps the names of JSON Schema formats to the functions below. What is no text of its format raises ValueError;
nothing is ever rounded.
"""

import re
from collections.abc import Callable, Mapping
from datetime import date, datetime, timedelta

DECIMAL_LENGTH_MAX = 100

_DECIMAL = re.compile(r"([+-]?)([0-9]+)(?:\.([0-9]+))?")
_CLOCK = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_DATE_TIME = re.compile(
    rf"({_DATE.pattern})[Tt]({_CLOCK}):([0-5][0-9]|60)(?:\.([0-9]+))?(?:[Zz]|([+-])({_CLOCK}))"
)  # RFC 3339, section 5.6


def decimal_spelling(text: str) -> str:
    """Spell a decimal number (sign, digits, fraction; no exponent; 100 characters at most): "+010.50" is "10.5".

    Raises:
        ValueError: it is none.
    """
    match = _DECIMAL.fullmatch(text)
    if match is None or len(text) > DECIMAL_LENGTH_MAX:
        raise ValueError("no decimal number")
    sign, whole, fraction = match.groups()
    digits = whole.lstrip("0") or "0"
    if fraction is not None and (fraction := fraction.rstrip("0")):
        digits += "." + fraction
    return "-" + digits if sign == "-" and digits != "0" else digits


def date_spelling(text: str) -> str:
    """Spell a date (RFC 3339 full-date, years 0001 to 9999), which has one spelling only.

    Raises:
        ValueError: it is none.
    """
    if _DATE.fullmatch(text) is None:
        raise ValueError("no date")
    date.fromisoformat(text)
    return text


def date_time_spelling(text: str) -> str:
    """Spell a moment (RFC 3339 date-time) in UTC, with a fraction of any length less its trailing zeros.

    A leap second stays what it is: 60 is taken where UTC has it, in the last minute of a day.

    Raises:
        ValueError: it is none, or outside the years 0001 to 9999 in UTC.
    """
    match = _DATE_TIME.fullmatch(text)
    if match is None:
        raise ValueError("no date-time")
    day, clock, second, fraction, sign, offset = match.groups()
    moment = datetime.fromisoformat(f"{day}T{clock}:00")
    if sign is not None:
        ahead = timedelta(hours=int(offset[:2]), minutes=int(offset[3:]))
        try:
            moment = moment - ahead if sign == "+" else moment + ahead
        except OverflowError:
            raise ValueError("outside the years 0001 to 9999") from None
    if second == "60" and (moment.hour, moment.minute) != (23, 59):
        raise ValueError("no leap second of UTC")
    tail = "." + rest if fraction is not None and (rest := fraction.rstrip("0")) else ""
    return f"{moment.isoformat(timespec='minutes')}:{second}{tail}Z"


FORMATS: Mapping[str, Callable[[str], str]] = {
    "decimal": decimal_spelling,
    "date-time": date_time_spelling,
    "date": date_spelling,
}


def _check_of(spell: Callable[[str], str]) -> Callable[[str], bool]:
    def check(text: str) -> bool:
        try:
            spell(text)
        except ValueError:
            return False
        return True

    return check


# A validator checks with the functions that spell, so that what it takes can always be spelled.
CHECKS: Mapping[str, Callable[[str], bool]] = {name: _check_of(spell) for name, spell in FORMATS.items()}

"""Options that several commands have."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import click

from decideonce_server.catalog_dir import parse_duration


class _Duration(click.ParamType[timedelta]):
    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        if isinstance(value, timedelta):
            return value
        duration = parse_duration(value)
        if duration is None:
            self.fail("must be a duration: 250ms, 2s, 5m, 24h, 30d", param, ctx)
        return duration


DURATION = _Duration()
# Of a policy, as the protos can say it.
VERSION = click.IntRange(1, 2**32 - 1)

_UNITS_MS = {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1_000, "ms": 1}


def duration_text(duration: timedelta) -> str:
    """Write a duration as a catalog has it, in the largest unit that needs no fraction."""
    milliseconds = round(duration / timedelta(milliseconds=1))
    unit, size = next((unit, size) for unit, size in _UNITS_MS.items() if milliseconds % size == 0)
    return f"{milliseconds // size}{unit}" if milliseconds else "0s"


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for machines.")


def setting(flag: str, help_text: str, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a setting: a flag, and a DECIDEONCE_… variable of the same name."""
    variable = "DECIDEONCE_" + flag.removeprefix("--").split("/")[0].replace("-", "_").upper()
    shown = {"show_envvar": True, "show_default": True, **options}
    return click.option(flag, envvar=variable, help=help_text, **shown)

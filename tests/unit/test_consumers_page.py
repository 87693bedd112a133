"""docs/consumers.md shows the examples as they are."""

import re
from pathlib import Path

from decideonce import events, inbox

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/consumers.md").read_text()


def test_code_on_the_page_is_the_examples() -> None:
    """Every piece of Python on the page stands in the file that it is said to be of."""
    shown = re.findall(r"<!-- (\S+) -->\n```python\n(.*?)```", PAGE, re.DOTALL)
    assert PAGE.count("```python") == len(shown) == 3
    assert [] == [name for name, code in shown if code not in (ROOT / name).read_text()]


def test_names_on_the_page_are_there() -> None:
    """Every function and field that the page names is the package's."""
    named = re.findall(r"`(?:await )?(events|inbox)\.(\w+)", PAGE)
    assert {"from_kafka", "first_time", "purge"} <= {name for _, name in named}
    places = {"events": events, "inbox": inbox.Inbox}
    assert [] == [name for place, name in named if not hasattr(places[place], name)]
    fields = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", PAGE, re.MULTILINE)
    known = {name.strip("`") for row in fields for name in row.split(", ")}
    assert set(events.Event.__match_args__) <= known
    assert [] == [
        name
        for name in known
        if not hasattr(events, name) and not hasattr(events.Event, name) and not hasattr(inbox, name)
    ]

"""docs/consumers.md names what there is."""

import re
from pathlib import Path

from decideonce import events, inbox

PAGE = (Path(__file__).parents[2] / "docs/consumers.md").read_text()


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

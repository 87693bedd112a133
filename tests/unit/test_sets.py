"""Sets of calls that share a statement."""

import asyncio
from collections.abc import Sequence
from uuid import uuid4

import pytest

from decideonce_server import lull
from decideonce_server.sets import CROWD_MIN, SHARE, Crowd, Sets


class Statements:
    """Notes each set that it is given, and gives its members back."""

    def __init__(self) -> None:
        self.sets: list[list[int]] = []

    async def run(self, members: Sequence[int]) -> list[int]:
        """Take a set."""
        self.sets.append(list(members))
        return list(members)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have only a crowd decide how long a set waits, and not a machine that is held up."""
    monkeypatch.setattr(lull, "WAIT_MAX_S", 60.0)


async def test_in_a_crowd_a_set_waits_for_its_share() -> None:
    """A member that comes in a crowd of attempts goes with those that come after it, as many as are its share."""
    statements = Statements()
    members = [*range(int(CROWD_MIN * SHARE))]
    others: list[asyncio.Task[int]] = []

    def crowd_size() -> int:
        """Tell of a crowd; whenever a set looks for more, one comes."""
        if len(others) < len(members) - 1:
            others.append(asyncio.create_task(sets.run(members[len(others) + 1])))
        return CROWD_MIN

    sets = Sets(statements.run, lambda _: "acme", crowd_size=crowd_size)
    assert members[0] == await sets.run(members[0])
    assert members[1:] == await asyncio.gather(*others)
    assert [members] == statements.sets


@pytest.mark.parametrize("attempts", [0, 1, CROWD_MIN - 1])
async def test_without_a_crowd_nobody_waits(attempts: int) -> None:
    """A member that finds few attempts under way goes alone."""
    statements = Statements()
    sets = Sets(statements.run, lambda _: "acme", crowd_size=lambda: attempts)
    assert 7 == await sets.run(7)
    assert [[7]] == statements.sets


async def test_a_set_that_has_its_share_waits_no_longer() -> None:
    """Members that are there together, as many as are a crowd's share, go at once."""
    statements = Statements()
    looks: list[int] = []

    def crowd_size() -> int:
        """Tell of a crowd."""
        looks.append(CROWD_MIN)
        return CROWD_MIN

    sets = Sets(statements.run, lambda _: "acme", crowd_size=crowd_size)
    members = [*range(int(CROWD_MIN * SHARE))]
    assert members == await asyncio.gather(*map(sets.run, members))
    assert [members] == statements.sets
    assert [CROWD_MIN] == looks


def test_crowd_counts_attempts_until_they_end() -> None:
    """An attempt is of the crowd from its beginning to its end, and one that ended counts no more."""
    crowd = Crowd()
    attempts = [uuid4() for _ in range(3)]
    for attempt in attempts:
        crowd.begin(attempt)
    assert 3 == crowd.size()
    crowd.end(attempts[1])
    crowd.end(attempts[1])
    assert 2 == crowd.size()


def test_attempt_that_takes_its_time_is_no_longer_of_the_crowd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose policy is slow holds up nobody's set; its end, later, changes nothing."""
    crowd = Crowd()
    slow, quick = uuid4(), uuid4()
    crowd.begin(slow)
    monkeypatch.setattr("decideonce_server.sets.SOON_S", -1.0)
    assert 0 == crowd.size()
    monkeypatch.setattr("decideonce_server.sets.SOON_S", 60.0)
    crowd.begin(quick)
    crowd.end(slow)
    assert 1 == crowd.size()

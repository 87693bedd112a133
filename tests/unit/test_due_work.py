"""Which of the work that is due a process takes up."""

from collections import Counter
from dataclasses import replace

from decideonce_server.due_work import choose
from decideonce_server.ledger import Key, Record

NOTHING = dict.fromkeys(Record.__dataclass_fields__)


def due(*backlogs: tuple[str, int]) -> list[Record]:
    empty = Record(**NOTHING)
    return [replace(empty, key=Key(tenant, "op", f"{tenant}-{i}")) for tenant, count in backlogs for i in range(count)]


def test_one_place_goes_to_any_tenant() -> None:
    """With room for one, a tenant with one decision waiting is chosen as often as one with sixty."""
    work = due(("busy", 60), ("other", 1))
    chosen = Counter(record.key.tenant for _ in range(2000) for record in choose(work, 1))
    assert 800 < chosen["other"] < 1200


def test_tenants_are_chosen_from_in_turn() -> None:
    """With room for more, each tenant has its turn before any has a second."""
    chosen = Counter(record.key.tenant for record in choose(due(("a", 60), ("b", 2), ("c", 1)), 6))
    assert {"a": 3, "b": 2, "c": 1} == chosen


def test_nothing_is_chosen_twice() -> None:
    """With room for all, all are chosen, each once."""
    work = due(("a", 3), ("b", 2))
    assert {record.key for record in work} == {record.key for record in choose(work, 10)}
    assert 5 == len(choose(work, 10))

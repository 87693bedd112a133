"""Waiting for a lull of the event loop."""

import asyncio
import time
from collections.abc import Callable

import pytest
import uvloop

from decideonce_server import lull
from decideonce_server.lull import TURN_S, WAIT_MAX_S, Lull
from processes import until

# Production runs on uvloop; command-line programs and tests may not.
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def busy_step(then: Callable[[], None]) -> Callable[[], None]:
    """Make a step of the loop that takes longer than a turn with nothing to do."""

    def step() -> None:
        end = time.thread_time() + 2 * TURN_S
        while time.thread_time() < end:
            pass
        then()

    return step


async def test_what_is_asked_for_several_times_is_done_once() -> None:
    """Everybody who asks until it is done shares it; who asks after that has it done again."""
    done: list[int] = []
    asked = 0
    shared = Lull(lambda: done.append(asked))
    for _ in range(3):
        asked += 1
        shared.ask()
    await until(lambda: done)
    assert [3] == done
    asked += 1
    shared.ask()
    await until(lambda: len(done) > 1)
    assert [3, 4] == done


async def test_those_that_the_loop_is_busy_with_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one step follows another it is not done; those that the steps bring are in time for it."""
    # A machine that is held up for longer than the limit is another test's.
    monkeypatch.setattr(lull, "WAIT_MAX_S", 60.0)
    loop = asyncio.get_running_loop()
    brought = 0
    done: list[int] = []
    bringing = Lull(lambda: done.append(brought))

    def bring() -> None:
        nonlocal brought
        brought += 1
        bringing.ask()
        if brought < 5:
            loop.call_soon(busy_step(bring))

    bring()
    await until(lambda: done)
    assert [5] == done


async def test_a_loop_that_stays_busy_does_it_all_the_same() -> None:
    """Without a lull it is done after a limit."""
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    done: list[float] = []
    began = time.perf_counter()

    def work() -> None:
        done.append(time.perf_counter() - began)
        over.set()

    def go_on() -> None:
        if not over.is_set():
            loop.call_soon(busy_step(go_on))

    Lull(work).ask()
    go_on()
    await over.wait()
    assert 1 == len(done)
    assert done[0] >= WAIT_MAX_S


async def test_it_waits_for_more_that_is_said_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a lull it is done when no more is expected."""
    monkeypatch.setattr(lull, "WAIT_MAX_S", 60.0)
    expected = [True, True, False]
    done: list[int] = []
    Lull(lambda: done.append(len(expected)), lambda: expected.pop(0)).ask()
    await until(lambda: done)
    assert [0] == done


async def test_more_that_does_not_come_is_waited_for_no_longer_than_the_limit() -> None:
    """What is expected and stays away holds nothing up after the limit."""
    done: list[float] = []
    began = time.perf_counter()
    Lull(lambda: done.append(time.perf_counter() - began), lambda: True).ask()
    await until(lambda: done)
    assert done[0] >= WAIT_MAX_S

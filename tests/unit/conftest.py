import asyncio
from collections.abc import Callable, Mapping

import pytest


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Function
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run a module's tests on each of its LOOPS, where it says so."""
    return getattr(item.module, "LOOPS", {"asyncio": asyncio.new_event_loop})

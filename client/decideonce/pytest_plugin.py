"""The pytest plugin: the fixture `decideonce_server`, a service of `decideonce.testing` for one test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from decideonce.testing import DecideonceServer


@pytest.fixture
def decideonce_server() -> Iterator[DecideonceServer]:
    """Give a service in this process; see `decideonce.testing.DecideonceServer`."""
    # Not before: every run of pytest loads this module, and few need gRPC.
    from decideonce.testing import DecideonceServer  # noqa: PLC0415

    with DecideonceServer() as server:
        yield server

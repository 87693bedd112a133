"""The service of a module, as tests/acceptance has it."""

from acceptance.conftest import caller, flags, stage, view

__all__ = ["caller", "flags", "stage", "view"]

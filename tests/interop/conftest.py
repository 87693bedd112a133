"""The service of a module, as tests/acceptance has it."""

from acceptance.conftest import flags, stage, view

__all__ = ["flags", "stage", "view"]

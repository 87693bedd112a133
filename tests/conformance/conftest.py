"""The real service that conformance is to, as acceptance has it."""

from acceptance.conftest import flags, stage  # noqa: F401  # fixtures

"""Counts what a policy must not count; outside of the policy, so that the guard doesn't see it."""


def count(path):
    """Count one more, and give the number."""
    with open(path, "a+") as file:
        file.write("x")
        return file.tell()

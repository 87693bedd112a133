"""The program's entry.

It imports nothing of ours at its head: the command line takes a while to load, and what only asks this module for
`main` needs none of it.
"""

import os


def main() -> None:
    """Run the command line."""
    # The program starts others (Postgres, evaluators) and never forks itself: gRPC's fork handlers only warn about it.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    from decideonce_server.cli import cli  # noqa: PLC0415

    cli(prog_name="decideonce")


if __name__ == "__main__":
    main()

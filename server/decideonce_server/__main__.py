"""The program's entry. It imports nothing at its head: evaluator processes load this module and need none of it."""


def main() -> None:
    """Run the command line."""
    from decideonce_server.cli import cli  # noqa: PLC0415

    cli(prog_name="decideonce")


if __name__ == "__main__":
    main()

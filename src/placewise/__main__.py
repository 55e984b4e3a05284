"""`python -m placewise` is `placewise`."""

import sys


def main() -> None:
    """Run a command. Ctrl-C may come while the command line itself is being imported."""
    try:
        from placewise.cli import main

        main()
    except KeyboardInterrupt:
        print("interrupted: there is no result yet", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()

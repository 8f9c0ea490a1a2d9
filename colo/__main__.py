"""`colo` and `python -m colo`: the command line, or the line that installs it."""

import sys

from colo.errors import Unsupported, named_extra


def main() -> None:
    """Run the command line and exit; with 2 where what it needs is not installed."""
    try:
        with named_extra("the command line"):
            from colo.cli import main as run
    except Unsupported as error:
        print(error, file=sys.stderr)  # noqa: T201 - without what the command line prints with
        sys.exit(2)
    run()


if __name__ == "__main__":
    main()

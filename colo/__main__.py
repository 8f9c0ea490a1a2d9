"""`python -m colo`: the same as `colo`."""

from colo.cli import main

if __name__ == "__main__":
    main()

"""`python -m replicad`: the same as the command `replicad`."""

from replicad.cli import main

if __name__ == "__main__":
    main()

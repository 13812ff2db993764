"""`python -m scoremod` is the command `scoremod`."""

from .cli import main

if __name__ == "__main__":
    main(prog_name="scoremod")

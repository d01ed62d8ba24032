"""The command's start, and `python -m edgeinfer`: light, so that a Ctrl-C of the first moment is met here."""

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line and exit with the contract's code."""
    try:
        from edgeinfer.cli.app import main as run
    except KeyboardInterrupt:
        from edgeinfer.cli import console
        from edgeinfer.errors import InterruptedByUser

        console.fail_at_once(InterruptedByUser("interrupted"), as_json="--json" in sys.argv)
    run()


if __name__ == "__main__":
    main()

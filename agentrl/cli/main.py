"""`agentrl`: the entry point of the command line."""

from __future__ import annotations

import sys

from agentrl.cli.app import app
from agentrl.cli.boundary import STOPPED


def main() -> None:
    """Run the command line; never a traceback for what a person did."""
    try:
        app()
    except KeyboardInterrupt:
        sys.stderr.write("agentrl: Stopped.\n")
        sys.exit(STOPPED)


if __name__ == "__main__":
    main()

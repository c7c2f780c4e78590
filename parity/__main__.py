"""`python -m parity`, and `mha-parity`: the command line."""

import signal
import sys


def main() -> int:
    """Run the command line. Until it is imported, an interrupt ends the process at once and without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from parity.cli.main import main

    return main()


if __name__ == "__main__":
    sys.exit(main())

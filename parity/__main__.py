"""`python -m parity`, and `mha-parity`: the command line."""

import os
import signal
import sys
from typing import Any, NoReturn


def main() -> int:
    """Run the command line."""
    # Until it is imported, an interrupt ends the process at once and without a traceback. If a
    # caller handles SIGINT, its handler stays.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end_process)
    from parity.use.cli import main as command_line

    return command_line.main()


def _end_process(number: int, frame: Any) -> NoReturn:
    """End the process with the status of an interrupted command.

    Nothing was begun that must be cleaned up. An exception would not do: an import may hide it.
    """
    try:
        os.write(2, b"mha-parity: interrupted\n")
    finally:
        os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())

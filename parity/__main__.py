"""`python -m parity`: the command line."""

import sys

from parity.cli import main

sys.exit(main())

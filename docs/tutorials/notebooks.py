"""The hidden beginning of each notebook: the style of its pictures, cells that run in TTNN, and
wrong answers to its exercises.

JAX and ttnn cannot be installed together, because JAX needs numpy>=2 and ttnn numpy<2. A cell that
begins with `%%ttnn` therefore runs in a second kernel, in the environment that has ttnn. Its
variables stay there.
"""

import atexit
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from IPython.core.getipython import get_ipython
from jupyter_client.kernelspec import NoSuchKernel
from jupyter_client.manager import KernelManager
from matplotlib.colors import ListedColormap
from wrong_answers import exercises_of

CELLS = ListedColormap(["#7b808722", "#2f81f7"])
"""Colors of a boolean array: hardly visible, and blue."""

EDGES = "#7b808744"
"""Color of the lines between its cells."""

FOLDER = Path(__file__).parent
KERNELS = FOLDER.parents[1] / "build" / "docs" / "jupyter"  # `make docs` writes them

ABSENT = (
    "This cell was not executed, because there is no environment with ttnn. `make docs` makes one "
    "if it finds CPython 3.12."
)


class SecondKernel:
    """A kernel of the environment with ttnn, which starts with the first cell that needs it."""

    def __init__(self) -> None:
        self._manager: KernelManager | None = None
        self._client: Any = None

    def run(self, line: str, cell: str) -> None:
        """Run a cell and print what it prints. An error there is an error here."""
        if self._client is None:
            try:
                self._start()
            except NoSuchKernel:
                print(ABSENT)
                return
        reply = self._client.execute_interactive(cell, output_hook=print_text, timeout=180)
        if reply["content"]["status"] == "error":
            raise RuntimeError("\n".join(reply["content"]["traceback"]))

    def _start(self) -> None:
        os.environ.setdefault("JUPYTER_PATH", str(KERNELS))
        manager = KernelManager(kernel_name="ttnn")
        # Logs of the device would be in the output or not, depending on when they arrive.
        manager.start_kernel(stderr=subprocess.DEVNULL)
        atexit.register(manager.shutdown_kernel, now=True)
        client = manager.blocking_client()
        client.start_channels()
        client.wait_for_ready(timeout=180)
        self._manager = manager
        self._client = client


def print_text(message: dict[str, Any]) -> None:
    """Print a message of a kernel if it is printed text or the value of a cell."""
    content = message["content"]
    if message["msg_type"] == "stream" and content["name"] == "stdout":
        sys.stdout.write(content["text"])
    if message["msg_type"] == "execute_result":
        print(content["data"]["text/plain"])


def try_wrong_answers(notebook: str, number: int) -> None:
    """Run each typical wrong answer to an exercise through its check, and compare the messages."""
    names = vars(sys.modules["__main__"])  # the variables of the notebook
    exercises_of(notebook)[number].try_wrong_answers(names)


plt.style.use(FOLDER / "site.mplstyle")
shell = get_ipython()
if shell is not None:
    shell.register_magic_function(SecondKernel().run, "cell", "ttnn")

"""A module that stands for ttnn, so that the docstrings of `mha_tt` and `ttnn_mock` can be read
without it.
"""

import sys
from importlib.machinery import ModuleSpec


class Absent(type):
    """A class for every name of ttnn, with another one for each of its attributes."""

    def __getattr__(cls, name: str) -> "Absent":
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(name, (), {"__module__": "ttnn"})


def install() -> None:
    """Let `import ttnn` return the stand-in."""
    ttnn = Absent("ttnn", (), {"__spec__": ModuleSpec("ttnn", None), "__path__": []})
    sys.modules["ttnn"] = ttnn  # pyright: ignore[reportArgumentType]

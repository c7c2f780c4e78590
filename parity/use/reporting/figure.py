"""A figure of matplotlib that notebooks show, and that is the same bytes for the same drawing."""

from __future__ import annotations

import io
from typing import Literal

import matplotlib as mpl
from matplotlib.figure import Figure


class NotebookFigure(Figure):
    """A figure without pyplot: nothing global changes, and no window system is needed."""

    def image(self, kind: Literal["png", "svg"]) -> bytes:
        """Return the picture; text stays text in an SVG."""
        # Dates, versions and random identifiers would make other bytes of the same drawing.
        metadata = {"Date": None} if kind == "svg" else {"Software": None}
        file = io.BytesIO()
        with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "mha-parity"}):
            self.savefig(file, format=kind, dpi=120, metadata=metadata)
        return file.getvalue()

    def _repr_png_(self) -> bytes:
        return self.image("png")

"""Families whose attention is not read, and what stands in the way."""

from __future__ import annotations

NOT_COVERED: dict[str, str] = {}

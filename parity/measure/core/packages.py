"""Optional packages: detection, versions, and errors with installation commands."""

from __future__ import annotations

from functools import cache
from importlib import metadata
from importlib.util import find_spec

PACKAGES = ("numpy", "ml_dtypes", "safetensors", "jax", "jaxlib", "flax", "torch", "ttnn")
"""Packages that may affect results; all reports contain their versions."""

OPTIONAL = {
    "jax": ("jax", "the backend jax; JAX arrays in assert_parity"),
    "flax": ("flax", "the backend jax; flax in `conformance --libraries`"),
    "torch": ("torch", "the backend torch; torch tensors in assert_parity"),
    "orbax-checkpoint": ("orbax.checkpoint", "orbax checkpoints"),
    "gguf": ("gguf", "quantized tensors of GGUF files; others are read without it"),
    "jinja2": ("jinja2", "`--html`, `pytest --parity-report *.html`"),
    "pillow": ("PIL", "`run --html` and `compare --html`, for their pictures"),
    "matplotlib": ("matplotlib", "`plot`, `bench --plot`"),
    "transformers": (
        "transformers",
        "`run --against transformers`, observed model folders, tap and from_transformers of its "
        "models",
    ),
    "keras": ("keras", "keras in `conformance --libraries`"),
    "equinox": ("equinox", "equinox in `conformance --libraries`"),
    "pytest": ("pytest", "the fixture assert_parity; the function needs no pytest"),
}
"""Module and purpose of each package, by the name to install."""


@cache  # reading it takes longer than running a small case
def version_of(package: str) -> str | None:
    """Return the installed version, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def installed() -> dict[str, str]:
    """Return the versions of installed packages that may affect results."""
    versions = {package: version_of(package) for package in PACKAGES}
    return {package: version for package, version in versions.items() if version is not None}


def is_installed(package: str) -> bool:
    """Return whether an optional package is installed, without importing it."""
    module = OPTIONAL[package][0]
    parent = module.partition(".")[0]
    if find_spec(parent) is None:  # find_spec of a module imports its parent, which must exist
        return False
    return parent == module or find_spec(module) is not None


def check_installed(what: str, *packages: str) -> None:
    """Raise an error if a required package is missing.

    Args:
        what: feature that needs the packages.
        packages: names in `OPTIONAL`.

    Raises:
        ModuleNotFoundError: if a package is not installed.
    """
    missing = [package for package in packages if not is_installed(package)]
    if missing:
        reason = f"{what} needs {' and '.join(missing)}, not installed here"
        raise ModuleNotFoundError(f"{reason}: pip install {' '.join(missing)}")

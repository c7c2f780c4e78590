"""A template put together: the framework's own file, the parts that frameworks share, and the code
of each norm that a layer has.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

from mha_spec import AttentionSpec, Norm
from parity.explain.writing.specialize import Decision, resolved

TEMPLATES = Path(__file__).with_name("templates")

IMPORT = re.compile(r"^from parity\.explain\.writing\.templates\.(\w+) import \*\n", re.MULTILINE)
"""A line of a template that the code of a part replaces."""

ARRAYS = {"jax": ("jnp", "Array"), "torch": ("torch", "Tensor"), "ttnn": ("np", "np.ndarray")}
"""The module of array functions and the type of arrays. Parts are written with JAX's."""


class NormNames(NamedTuple):
    """Names of a norm in written modules.

    Attributes:
        eps: the constant.
        function: the function, in JAX and TTNN.
        module: the class, in PyTorch.
    """

    eps: str
    function: str
    module: str


NORMS = {
    "qk": NormNames("QK_EPS", "normalize_qk", "QKNorm"),
    "v": NormNames("V_EPS", "normalize_v", "VNorm"),
    "context": NormNames("CONTEXT_EPS", "normalize_context", "ContextNorm"),
    "latents": NormNames("LATENT_EPS", "normalize_latents", "LatentNorm"),
}


def template_of(spec: AttentionSpec, framework: str, decided: set[Decision]) -> str:
    """Return the template of a framework, with the norms of a layer.

    Args:
        spec, framework: as in `source_of`.
        decided: as in `specialize`.
    """
    template = (TEMPLATES / f"{framework}.py").read_text()
    module, array = ARRAYS[framework]
    for part in IMPORT.findall(template):
        code = _code_of(part)
        code = re.sub(r"\bjnp\b", module, code)
        code = re.sub(r"\bArray\b", array, code)
        template = template.replace(_import_of(part), code)
    norms = norms_of(spec)
    if framework == "torch":
        norms = own_norms(spec)
    for name, norm in norms.items():
        template += "\n\n" + _norm_code(framework, NORMS[name], norm, decided)
    return template


def norms_of(spec: AttentionSpec) -> dict[str, Norm]:
    """Return the norms of a layer, by the names of `NORMS`."""
    norms = {}
    if spec.qk_norm is not None:
        norms["qk"] = spec.qk_norm
    if spec.v_norm is not None:
        norms["v"] = spec.v_norm
    if spec.context_norm is not None:
        norms["context"] = spec.context_norm
    if spec.latent is not None:
        norms["latents"] = Norm(eps=spec.latent.eps)
    return norms


def own_norms(spec: AttentionSpec) -> dict[str, Norm]:
    """Return the norms that are neither PyTorch's `nn.RMSNorm` nor its `nn.LayerNorm`."""
    norms = {}
    for name, norm in norms_of(spec).items():
        has_bias_of_its_own = norm.kind == "rms" and norm.bias
        if norm.weight == "1+w" or norm.per_head or has_bias_of_its_own:
            norms[name] = norm
    return norms


def _norm_code(framework: str, names: NormNames, norm: Norm, decided: set[Decision]) -> str:
    code = resolved(_code_of(f"{framework}_norm"), {"norm": norm}, decided)
    code = re.sub(r"\bEPS\b", names.eps, code)
    code = re.sub(r"\bnormalize\b", names.function, code)
    return re.sub(r"\bOwnNorm\b", names.module, code)


def _import_of(part: str) -> str:
    return f"from parity.explain.writing.templates.{part} import *\n"


def _code_of(part: str) -> str:
    """Return the code of a file, without its docstring and imports."""
    text = (TEMPLATES / f"{part}.py").read_text()
    first = next(statement for statement in ast.parse(text).body if _is_code(statement))
    return "".join(text.splitlines(keepends=True)[first.lineno - 1 :])


def _is_code(statement: ast.stmt) -> bool:
    return not isinstance(statement, ast.Expr | ast.Import | ast.ImportFrom)

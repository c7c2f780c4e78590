"""Propose the table of a layout for a file that fits none, from its names and shapes.

Names show which tensor holds which projection, if they contain usual words; otherwise shapes may.
Each candidate is applied to the shapes, and proposed only if it fits for some number of heads. The
table has a comment on everything else, such as the order of heads in a packed tensor.
"""

from __future__ import annotations

import glob
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from parity.measure.text import and_listed
from parity.port.conversion.hints import LayerHints
from parity.port.conversion.layouts.custom import layout_from_table
from parity.port.conversion.layouts.detection import UnknownHeadsError, find_spec, stack_sizes
from parity.port.conversion.layouts.layout import Layout

Shapes = Mapping[str, tuple[int, ...]]

AXES = (
    ("(n h) d", "e (n h)"),
    ("d (n h)", "(n h) e"),
    ("d n h", "n h e"),
    ("n d h", "n h e"),
    ("n h d", "e n h"),
)
"""Usual axes of a projection and of the output, in the order in which they are tried: those of
torch; of Flax without and with an axis of heads; of Gemma in JAX; of torch with an axis of heads.
"""

WORDS = {
    "q": "q",
    "wq": "q",
    "query": "q",
    "queries": "q",
    "k": "k",
    "wk": "k",
    "key": "k",
    "keys": "k",
    "v": "v",
    "wv": "v",
    "value": "v",
    "values": "v",
    "o": "out",
    "wo": "out",
    "out": "out",
    "output": "out",
}
"""Usual words in the names of projections."""

OF_SEVERAL = re.compile(r"w?([qkv]{2,3})")
"""Words that name several projections, such as `qkv` or `wkv`."""

OF_NORMS = {"norm", "layernorm", "rmsnorm", "ln"}
OF_BIASES = {"bias", "biases", "b"}

OF_OTHERS = re.compile(r"mlp|ffn|feed|fc\d|expert|moe|gate|router|emb|norm|conv|lm_head")
"""Parts of names that are not attention. A pair of matrices of an MLP can have the shapes of packed
projections and an output.
"""

MOST_TENSORS = 200
"""Most tensors under a prefix for which a table is proposed. A layer has about ten; a block of a
mixture of experts may have hundreds, and the table would have an entry for each.
"""


def propose_table(shapes: Shapes) -> str:
    """Return the text of a TOML file with a table that fits some tensors; empty if none is found.

    Args:
        shapes: the shapes of all tensors of a file, by name.
    """
    candidates = _candidates(shapes)
    # Names are better evidence than shapes, so all prefixes are tried by names first.
    with_roles = [(prefix, tensors, _roles_by_name(tensors)) for prefix, tensors in candidates]
    for prefix, tensors in candidates:
        if not OF_OTHERS.search(prefix.lower()):
            with_roles.append((prefix, tensors, _roles_by_shape(tensors)))
    for prefix, tensors, roles in with_roles:
        tables = _fitting_tables(prefix, tensors, roles)
        if tables:
            return "".join([*_comments(roles, tables), *_lines(tables[0])])
    return ""


def _candidates(shapes: Shapes) -> list[tuple[str, Shapes]]:
    """Return prefixes of layers with the tensors under them, in the order in which to try them.

    Prefixes with a number come first, and longer ones before shorter ones, because fewer tensors
    under them are something else. Layers that differ only in their number are taken to be equal.
    """
    tensors_under: dict[str, dict[str, tuple[int, ...]]] = {}
    first_of: dict[str, str] = {}
    for name, shape in shapes.items():
        words = name.split(".")
        for count in range(len(words)):
            concrete = ".".join(words[:count])
            prefix = re.sub(r"(?<![A-Za-z\d])\d+(?![A-Za-z\d])", "{i}", concrete)
            if first_of.setdefault(prefix, concrete) == concrete:
                tensors_under.setdefault(prefix, {})[".".join(words[count:])] = shape

    def order(prefix: str) -> tuple[bool, int]:
        return "{i}" not in prefix, -len(prefix.split(".")) if prefix else 0

    candidates = []
    for prefix in sorted(tensors_under, key=order):
        tensors = tensors_under[prefix]
        is_printable = prefix.isprintable() and all(name.isprintable() for name in tensors)
        if is_printable and prefix.count("{i}") < 2 and len(tensors) <= MOST_TENSORS:
            candidates.append((prefix, tensors))
    return candidates


# ---- Roles of tensors ----------------------------------------------------------------------------


@dataclass
class _Roles:
    """Projections in the tensors under a prefix.

    Attributes:
        weights: the projections in each weight, as in `Tensor.holds`.
        biases: those in each bias.
        norms: the canonical name of each weight of a norm of queries or keys.
        are_from_shapes: whether no name shows them.
    """

    weights: dict[str, str] = field(default_factory=dict)
    biases: dict[str, str] = field(default_factory=dict)
    norms: dict[str, str] = field(default_factory=dict)
    are_from_shapes: bool = False

    @property
    def are_of_layer(self) -> bool:
        """Return whether the weights hold each of q, k and v once, and the output at most once."""
        projections = [holds for holds in self.weights.values() if holds != "out"]
        num_outputs = len(self.weights) - len(projections)
        return sorted("".join(projections)) == ["k", "q", "v"] and num_outputs < 2

    def add_weight(self, name: str, holds: str, tensors: Shapes) -> None:
        """Add a weight with the bias of its module, if there is one."""
        self.weights[name] = holds
        module = re.sub(r"[._]?(weight|kernel|w)$", "", name)
        for bias in (f"{module}.bias", f"{module}_bias", f"{module}.b"):
            if bias in tensors:
                self.biases[bias] = holds


def _roles_by_name(tensors: Shapes) -> _Roles:
    """Return the roles that usual words in names show."""
    roles = _Roles()
    for name in tensors:
        words = {word: None for word in re.split(r"[^a-z\d]+", name.lower()) if word}
        holds = _projections_in(words)
        if not holds:
            continue
        is_bias = bool(OF_BIASES & words.keys())
        if OF_NORMS & words.keys():
            if holds in ("q", "k"):
                roles.norms[name] = f"{holds}_norm.{'bias' if is_bias else 'weight'}"
        elif is_bias:
            roles.biases[name] = holds
        else:
            roles.add_weight(name, holds, tensors)
    if "out" not in roles.weights.values():
        output = _unnamed_output(roles, tensors)
        if output is not None:
            roles.add_weight(output, "out", tensors)
    return roles


def _projections_in(words: Iterable[str]) -> str:
    """Return the projections that the words of a name mean; empty if there are none."""
    letters = ""
    for word in words:
        several = OF_SEVERAL.fullmatch(word)
        if several is not None:
            letters += several[1]
        elif WORDS.get(word) == "out":
            return "out"
        else:
            letters += WORDS.get(word, "")
    has_repeated = len({*letters}) < len(letters)
    return "" if has_repeated else letters


def _unnamed_output(roles: _Roles, tensors: Shapes) -> str | None:
    """Return the only other weight with as many axes as the queries; None without just one."""
    names_of_queries = [name for name, holds in roles.weights.items() if "q" in holds]
    if not names_of_queries:
        return None
    num_axes = len(tensors[names_of_queries[0]])
    others = []
    for name in _possible_matrices(tensors):
        if len(tensors[name]) == num_axes and name not in roles.weights:
            others.append(name)
    return others[0] if len(others) == 1 else None


def _possible_matrices(tensors: Shapes) -> list[str]:
    """Return the names of weights that are not those of an MLP or an embedding, by their names."""
    names = []
    for name, shape in tensors.items():
        if len(shape) > 1 and not OF_OTHERS.search(name.lower()):
            names.append(name)
    return names


def _roles_by_shape(tensors: Shapes) -> _Roles:
    """Return the roles of two matrices, if one may pack q, k and v, and the other be the output.

    With as many heads of keys as of queries the first is 3 times as wide as the other's input, and
    with fewer heads less.
    """
    roles = _Roles(are_from_shapes=True)
    matrices = _possible_matrices(tensors)
    if len(matrices) != 2:
        return roles
    output, packed = sorted(matrices, key=lambda name: math.prod(tensors[name]))
    sizes = math.prod(tensors[packed]), math.prod(tensors[output])
    if sizes[1] < sizes[0] <= 3 * sizes[1]:
        roles.add_weight(packed, "qkv", tensors)
        roles.add_weight(output, "out", tensors)
    return roles


# ---- Tables --------------------------------------------------------------------------------------


def _fitting_tables(prefix: str, tensors: Shapes, roles: _Roles) -> list[dict[str, Any]]:
    """Return the tables, with different axes, that fit the tensors for some number of heads."""
    if not roles.are_of_layer:
        return []
    choices = AXES
    if any("kernel" in name for name in roles.weights):
        choices = (*AXES[1:], AXES[0])  # kernels are (in, out), also where both orders fit
    fitting = []
    for axes, axes_of_output in choices:
        table = _table(prefix, tensors, roles, axes, axes_of_output)
        try:
            layout = layout_from_table(table)
        except ValueError:  # two tensors of one role, or a name that a table must not have
            return []
        if _fits(tensors, roles, layout):
            fitting.append(table)
    return fitting


def _table(
    prefix: str, tensors: Shapes, roles: _Roles, axes: str, axes_of_output: str
) -> dict[str, Any]:
    """Return a table of tensors with these axes; all other tensors are ignored by their names."""
    axes_of_bias = "(n h)" if "(n h)" in axes else "n h"
    entries: dict[str, dict[str, str]] = {}
    for name, holds in roles.weights.items():
        entries[name] = {"holds": holds, "axes": axes_of_output if holds == "out" else axes}
    for name, holds in roles.biases.items():
        entries[name] = {"holds": holds, "axes": "e" if holds == "out" else axes_of_bias}
    for name, holds in roles.norms.items():
        entries[name] = {"holds": holds}
    ignored: dict[str, None] = {}
    for name in tensors:
        if name not in entries:
            ignored[re.sub(r"(?<![^.])\d+(?![^.])", "*", glob.escape(name))] = None
    table: dict[str, Any] = {"name": "my-layout"}
    if prefix:
        table["prefix"] = prefix
    if ignored:
        table["ignored"] = list(ignored)
    return {**table, "tensors": entries}


def _fits(tensors: Shapes, roles: _Roles, layout: Layout) -> bool:
    """Return whether tensors are a layer, or a stack of layers, for some number of heads."""
    # Norms need a specification, which hides whether the axes of the projections fit.
    shapes = {}
    for name, shape in tensors.items():
        if name in roles.weights or name in roles.biases:
            shapes[name] = shape
    try:
        if stack_sizes(shapes, layout) is not None:
            # Under a number, the additional axis is that of heads: layers are already numbered.
            if "{i}" in layout.prefix:
                return False
            shapes = {name: shape[1:] for name, shape in shapes.items()}
        find_spec(shapes, layout, LayerHints())
    except UnknownHeadsError:
        return True
    except ValueError:
        return False
    return True


# ---- Text ----------------------------------------------------------------------------------------


def _comments(roles: _Roles, tables: list[dict[str, Any]]) -> Iterator[str]:
    """Yield comments on choices that nothing shows; the first of the tables is proposed."""
    yield "# A guess from names and shapes: check each line against the code of the model.\n"
    if roles.are_from_shapes:
        yield "# No name says what its tensor holds: that is a guess from shapes alone.\n"
    is_packed = any(len(holds) > 1 and holds != "out" for holds in roles.weights.values())
    if is_packed:
        yield "# Shapes do not show the order in a packed tensor: all q, then all k, then all v,\n"
        yield "# or other letters first; or, with grouped = true, that order in each group.\n"
    if len(tables) > 1:
        weight = next(iter(roles.weights))
        others = [table["tensors"][weight]["axes"] for table in tables[1:]]
        yield f"# The axes of {_quoted(weight)} may also be {and_listed(others)}.\n"
    yield '# RoPE pairs are (i, i + H/2), or with rope = "interleaved" (2 i, 2 i + 1).\n'


def _lines(table: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a table in TOML."""
    for key in ("name", "prefix"):
        if key in table:
            yield f"{key} = {_quoted(table[key])}\n"
    if "ignored" in table:
        yield f"ignored = [{', '.join(map(_quoted, table['ignored']))}]\n"
    yield "\n[tensors]\n"
    for name, entry in table["tensors"].items():
        fields = [f"{key} = {_quoted(value)}" for key, value in entry.items()]
        yield f"{_quoted(name)} = {{ {', '.join(fields)} }}\n"


def _quoted(text: str) -> str:
    """Return text as a string of TOML, whose escapes include those of JSON."""
    return json.dumps(text, ensure_ascii=False)

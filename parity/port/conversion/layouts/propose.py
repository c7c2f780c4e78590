"""Propose the table of a layout for a file that fits none, from its names and shapes.

Names show which tensor holds which projection, if they contain usual words; otherwise shapes may.
Each candidate is applied to the shapes, and proposed only if it fits for some number of heads. The
table has a comment on everything else, such as the order of heads in a packed tensor, or a tensor
that it leaves out.
"""

from __future__ import annotations

import glob
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from parity.measure.text import and_listed, some_of
from parity.port.conversion.layouts.custom import layout_from_table
from parity.port.conversion.layouts.detection import fits_layer, stack_sizes, without_axis
from parity.port.conversion.layouts.layout import Layout

Shapes = Mapping[str, tuple[int, ...]]

AXES = (
    ("(n h) d", "e (n h)"),
    ("d (n h)", "(n h) e"),
    ("d n h", "n h e"),
    ("n d h", "n h e"),
    ("n h d", "e n h"),
)
"""Usual axes of a projection and of the output, in the order in which they are tried: the names of
torch; of Flax without and with an axis of heads; of Gemma in JAX; of torch with an axis of heads.
"""

WORDS = {
    "q": "q",
    "wq": "q",
    "bq": "q",
    "query": "q",
    "queries": "q",
    "k": "k",
    "wk": "k",
    "bk": "k",
    "key": "k",
    "keys": "k",
    "v": "v",
    "wv": "v",
    "bv": "v",
    "value": "v",
    "values": "v",
    "o": "out",
    "wo": "out",
    "bo": "out",
    "out": "out",
    "output": "out",
}
"""Usual words in the names of projections."""

OF_SEVERAL = re.compile(r"[wb]?([qkv]{2,3})")
"""Words that name several projections, such as `qkv` or `wkv`, or their biases, such as `bqkv`."""

OF_OUTPUTS = re.compile(r"(?<![a-z])(out|proj|dense|back)")
"""Parts of names of an output projection, if no usual word names one."""

OF_NORMS = {"norm", "layernorm", "rmsnorm", "ln"}
OF_BIASES = re.compile(r"bias|biases|b|b(q|k|v|o|[qkv]{2,3})")
NORM_OF_HEADS = re.compile(r"(q|k|query|key)(norm|layernorm|rmsnorm|ln)")
"""Words that name both a projection and its norm, such as `qnorm`."""

OF_OTHERS = re.compile(r"mlp|ffn|feed|fc\d|expert|moe|gate|router|emb|norm|conv|lm_head")
"""Parts of names that are not attention. A pair of matrices of an MLP can have the shapes of packed
projections and an output.
"""

OF_BLOCKS = re.compile(
    r"mlp|ffn|feed|fc\d|expert|moe|router|emb|conv|lm_head|intermediate|"
    r"(?<![a-z])(up|down)(?![a-z])"
)
"""Parts of names in a block that are neither attention nor norms."""

OF_HEADS = re.compile(
    r"rel|sink|query|key|value|(?<![a-z])([qkv]{1,3}(?![a-z])|[qkv]_?(norm|layernorm|rmsnorm|ln))"
)
"""Parts of names of tensors that may belong to attention, whatever else their names contain."""

OF_ATTENTION = re.compile(
    r"att|head|score|alibi|slope|temperature|scale|gate|(?<![a-z])(out|output|proj|dense)(?![a-z])"
)
"""Parts of names of tensors that may belong to attention, unless others show a norm or an MLP."""

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
    by_name = []
    for prefix, tensors in candidates:
        by_name.append(_Guess(prefix, tensors, _roles_by_name(tensors)))
    by_shape = []
    for prefix, tensors in candidates:
        if not OF_OTHERS.search(prefix.lower()):
            by_shape.append(_Guess(prefix, tensors, _roles_by_shape(tensors)))
    # Names are better evidence than shapes, so all prefixes are tried by names first. The output
    # may be outside of the module of queries, keys and values, under a shorter prefix.
    by_name.sort(key=lambda one: ("{i}" not in one.prefix, not one.roles.has_sure_output))
    for candidate in (*by_name, *by_shape):
        tables = _fitting_tables(candidate)
        if tables:
            comments = _comments(candidate, tables, _others(candidate, by_name))
            return "".join([*comments, *_lines(tables[0])])
    return ""


def _others(chosen: _Guess, candidates: Iterable[_Guess]) -> list[str]:
    """Return the prefixes of other attention, neither above the chosen prefix nor under it."""
    prefixes: dict[str, None] = {}
    for candidate in candidates:
        if not candidate.roles.are_of_layer:
            continue
        other, own = f"{candidate.prefix}.", f"{chosen.prefix}."
        has_no_prefix = "" in (candidate.prefix, chosen.prefix)
        if not (has_no_prefix or other.startswith(own) or own.startswith(other)):
            prefixes[candidate.prefix] = None
    # The module of q, k and v of other attention may be under a prefix that is in the list.
    outermost = []
    for prefix in prefixes:
        words = prefix.split(".")
        above = {".".join(words[:count]) for count in range(1, len(words))}
        if not above & prefixes.keys():
            outermost.append(prefix)
    return outermost


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
        has_unnamed_output: whether only its shape shows the output.
        has_doubtful_output: whether the output is named so, but does not have the size of one.
    """

    weights: dict[str, str] = field(default_factory=dict)
    biases: dict[str, str] = field(default_factory=dict)
    norms: dict[str, str] = field(default_factory=dict)
    are_from_shapes: bool = False
    has_unnamed_output: bool = False
    has_doubtful_output: bool = False

    @property
    def has_sure_output(self) -> bool:
        """Return whether a weight is the output, and fits as one."""
        return "out" in self.weights.values() and not self.has_doubtful_output

    @property
    def are_of_layer(self) -> bool:
        """Return whether the weights hold each of q, k and v once, and the output at most once."""
        projections = [holds for holds in self.weights.values() if holds != "out"]
        num_outputs = len(self.weights) - len(projections)
        return sorted("".join(projections)) == ["k", "q", "v"] and num_outputs < 2

    def add_weight(self, name: str, holds: str, tensors: Shapes) -> None:
        """Add a weight with the bias of its module, if there is one."""
        self.weights[name] = holds
        for bias in _biases_of(name, tensors):
            self.biases[bias] = holds


@dataclass(frozen=True)
class _Guess:
    """A layer that may be attention: a prefix, the tensors under it, and their roles."""

    prefix: str
    tensors: Shapes
    roles: _Roles


def _biases_of(name: str, tensors: Shapes) -> list[str]:
    """Return the biases in the module of a weight."""
    module = re.sub(r"[._]?(weight|kernel|w)$", "", name)
    usual_names = (f"{module}.bias", f"{module}_bias", f"{module}.b")
    return [name for name in usual_names if name in tensors]


def _words(name: str) -> dict[str, None]:
    """Return the words of a name in order, each once."""
    return {word: None for word in re.split(r"[^a-z\d]+", name.lower()) if word}


def _is_bias(words: Iterable[str]) -> bool:
    """Return whether a word of a name means a bias."""
    return any(OF_BIASES.fullmatch(word) for word in words)


def _roles_by_name(tensors: Shapes) -> _Roles:
    """Return the roles that usual words in names show."""
    roles = _Roles()
    outputs, biases_of_outputs = [], []
    for name in tensors:
        words = _words(name)
        norm = _norm_in(words)
        if norm:
            roles.norms[name] = norm
        if OF_NORMS & words.keys() or norm or OF_OTHERS.search(name.lower()):
            continue
        holds = _projections_in(words)
        is_bias = _is_bias(words)
        if holds == "out" and is_bias:
            biases_of_outputs.append(name)
        elif holds == "out":
            outputs.append(name)
        elif holds and is_bias:
            roles.biases[name] = holds
        elif holds:
            roles.add_weight(name, holds, tensors)
    _add_output(roles, outputs, tensors)
    if "out" in roles.weights.values() and "out" not in roles.biases.values():
        # The bias may have a different name than its weight, such as `bo` for `wo`.
        of_other_weights = []
        for name in outputs:
            if name not in roles.weights:
                of_other_weights += _biases_of(name, tensors)
        free = [name for name in biases_of_outputs if name not in of_other_weights]
        if len(free) == 1:
            roles.biases[free[0]] = "out"
    return roles


def _norm_in(words: Mapping[str, None]) -> str:
    """Return the canonical name of a weight of a norm of queries or keys; empty for others."""
    kind = "bias" if _is_bias(words) else "weight"
    for word in words:
        joined = NORM_OF_HEADS.fullmatch(word)
        if joined is not None:
            return f"{joined[1][0]}_norm.{kind}"
    holds = _projections_in(words)
    if OF_NORMS & words.keys() and holds in ("q", "k"):
        return f"{holds}_norm.{kind}"
    return ""


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


def _add_output(roles: _Roles, named: list[str], tensors: Shapes) -> None:
    """Add the output: the weight named so, or else one of a different name that fits; or none.

    Args:
        roles: the roles of queries, keys and values, to which the output is added.
        named: the weights that usual words name as an output.
        tensors: all tensors under the prefix.
    """
    num_axes: list[int] = []
    for name, holds in roles.weights.items():
        if "q" in holds:
            num_axes.append(len(tensors[name]))
    fitting = []
    for name in _possible_matrices(tensors):
        is_free = name not in roles.weights and len(tensors[name]) in num_axes
        if is_free and _has_size_of_output(name, roles, tensors):
            fitting.append(name)
    named_and_fitting = [name for name in named if name in fitting]
    alike = [name for name in fitting if OF_OUTPUTS.search(name.lower())]
    # The first of these groups that has a tensor decides, if it has just one.
    for names in (named_and_fitting, alike, fitting):
        if len(names) == 1:
            roles.add_weight(names[0], "out", tensors)
            roles.has_unnamed_output = names is fitting
        if names:
            return
    if len(named) == 1:
        roles.add_weight(named[0], "out", tensors)
        roles.has_doubtful_output = True


def _has_size_of_output(name: str, roles: _Roles, tensors: Shapes) -> bool:
    """Return whether a matrix is as large as an output that has as many features as the inputs."""
    size = math.prod(tensors[name])
    sizes = {holds: math.prod(tensors[weight]) for weight, holds in roles.weights.items()}
    if "q" not in sizes:
        # One head of keys for each head of queries, or fewer; all are in packed tensors.
        packed = sum(sizes[holds] for holds in sizes if holds != "out")
        return size < packed <= 3 * size
    if sizes.get("k") and "v" in sizes:
        # Values may have a different head size than keys.
        return size * sizes["k"] == sizes["q"] * sizes["v"]
    return size == sizes["q"]


def _possible_matrices(tensors: Shapes) -> list[str]:
    """Return the names of weights that do not belong to an MLP or an embedding, by their names."""
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


def _fitting_tables(candidate: _Guess) -> list[dict[str, Any]]:
    """Return the tables, with different axes, that fit the tensors for some number of heads.

    Axes of self-attention come first: all inputs and the output have one number of features.
    """
    prefix, tensors, roles = candidate.prefix, candidate.tensors, candidate.roles
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
    return sorted(fitting, key=lambda table: len(_widths(roles, tensors, table)))


def _widths(roles: _Roles, tensors: Shapes, table: Mapping[str, Any]) -> set[int]:
    """Return the different numbers of inputs and outputs that the axes of a table mean."""
    widths = set()
    for name in roles.weights:
        axes = re.findall(r"\([^)]*\)|\w", table["tensors"][name]["axes"])
        for axis, letters in enumerate(axes):
            if letters in ("d", "e"):
                widths.add(tensors[name][axis - len(axes)])  # layers are stacked on the first axis
    return widths


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
            ignored[_numbered(glob.escape(name))] = None
    table: dict[str, Any] = {"name": "my-layout"}
    if prefix:
        table["prefix"] = prefix
    if ignored:
        table["ignored"] = list(ignored)
    return {**table, "tensors": entries}


def _numbered(name: str) -> str:
    """Return a name with an asterisk for each of its numbers."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _fits(tensors: Shapes, roles: _Roles, layout: Layout) -> bool:
    """Return whether tensors are a layer, or a stack of layers, for some number of heads."""
    # Norms need a specification, which hides whether the axes of the projections fit.
    shapes = {}
    for name, shape in tensors.items():
        if name in roles.weights or name in roles.biases:
            shapes[name] = shape
    try:
        if stack_sizes(shapes, layout) is not None:
            # Under a number, the additional axis is the axis of heads: layers are already numbered.
            if "{i}" in layout.prefix:
                return False
            shapes = without_axis(0, shapes)
    except ValueError:
        return False
    return fits_layer(shapes, layout)


# ---- Text ----------------------------------------------------------------------------------------


def _comments(candidate: _Guess, tables: list[dict[str, Any]], others: list[str]) -> Iterator[str]:
    """Yield comments on choices that nothing shows, and on tensors that the table leaves out.

    Args:
        candidate: the prefix with its tensors and their roles.
        tables: the tables that fit; the first is proposed.
        others: prefixes of other attention.
    """
    roles = candidate.roles
    yield "# A guess from names and shapes: check each line against the code of the model.\n"
    if roles.are_from_shapes:
        yield "# No name says what its tensor holds: that is a guess from shapes alone.\n"
    is_packed = any(len(holds) > 1 and holds != "out" for holds in roles.weights.values())
    if is_packed:
        yield "# Shapes do not show the order in a packed tensor: all q, then all k, then all v,\n"
        yield "# or other letters first; or, with grouped = true, that order in each group.\n"
    if len(tables) > 1:
        weight = next(iter(roles.weights))
        axes = [table["tensors"][weight]["axes"] for table in tables[1:]]
        yield f"# The axes of {_quoted(weight)} may also be {and_listed(axes)}.\n"
    if roles.has_unnamed_output:
        yield "# No name says which tensor is the output: that is a guess from shapes.\n"
    if roles.has_doubtful_output:
        yield "# The output does not have as many features as the inputs: is it of attention?\n"
    if "out" not in roles.weights.values():
        yield "# No tensor is sure to be the output projection: add it if the model has one.\n"
    left_out = _left_out(candidate)
    if left_out:
        yield "# These ignored tensors may belong to attention: converted layers would lack them.\n"
        yield '# A table cannot hold one, unless it is a gate ("g") or another canonical\n'
        yield '# weight, such as "sinks" or "q_norm.weight":\n'
        for name, shape in left_out.items():
            yield f"#   {_quoted(name)}, {' x '.join(map(str, shape))}\n"
    if others:
        yield f"# There is other attention, which needs a table: {some_of(map(_quoted, others))}.\n"
    yield '# RoPE pairs are (i, i + H/2), or with rope = "interleaved" (2 i, 2 i + 1).\n'


def _left_out(candidate: _Guess) -> dict[str, tuple[int, ...]]:
    """Return the shapes of ignored tensors that may belong to attention, by name."""
    roles = candidate.roles
    entries = {**roles.weights, **roles.biases, **roles.norms}
    left_out = {}
    for name, shape in candidate.tensors.items():
        if name not in entries and _may_be_of_attention(name, candidate):
            left_out.setdefault(_numbered(name), shape)
    return left_out


def _may_be_of_attention(name: str, candidate: _Guess) -> bool:
    """Return whether a tensor may belong to attention, by its name or shape."""
    shape, roles = candidate.tensors[name], candidate.roles
    module = candidate.prefix.rpartition(".")[2].lower()
    if "att" in module:
        return True
    lower = name.lower()
    if OF_HEADS.search(lower):
        return True
    if OF_BLOCKS.search(lower) or "norm" in lower or OF_NORMS & _words(lower).keys():
        return False
    if OF_ATTENTION.search(lower):
        return True
    if len(shape) > 1:
        return not roles.has_sure_output and _has_size_of_output(name, roles, candidate.tensors)
    sizes = []
    for weight in roles.weights:
        sizes += candidate.tensors[weight]
    if not shape or shape[0] == 0:
        return False
    return any(size % shape[0] == 0 for size in sizes)


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
    """Return text as a string of TOML, whose escapes include JSON's."""
    return json.dumps(text, ensure_ascii=False)

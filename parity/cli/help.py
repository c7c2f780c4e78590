"""What `--help` says of each command: what it does, an example, and what its exit status means."""

from __future__ import annotations

from typing import NamedTuple

EXIT_STATUS = (
    "exit status: 0 all well, 1 a mismatch, 2 bad usage or something missing, 70 a mistake of this program, "
    "128 + n stopped by signal n"
)


class Page(NamedTuple):
    """The help of one command.

    Attributes:
        about: what it does, in a sentence or two.
        example: a command line, as one would type it; it may go on after a backslash at the end of a line.
        well: when the exit status is 0.
        wrong: when it is 1; empty where it never is.
    """

    about: str
    example: str
    well: str
    wrong: str = ""

    @property
    def epilog(self) -> str:
        """Example and exit status, as they stand below the options."""
        wrong = f"; 1 {self.wrong}" if self.wrong else ""
        status = f"0 {self.well}{wrong}; 2 bad usage or something missing"
        return f"example:\n  {self.example}\n\nexit status:\n  {status}"


PAGES = {
    "run": Page(
        "Run cases on every backend and compare each stage (q, k, v, scores, attention weights, context, output, "
        "cache, gradients) with the float64 reference. What is allowed follows from the rounding of the dtype.",
        "mha-parity run --backends jax,torch --cases 'rope*' --dtypes float32,bfloat16",
        "every stage that ran agrees",
        "a stage does not",
    ),
    "cases": Page(
        "List the cases that `run` knows, one a line: heads and tokens, what is masked, and what goes wrong when the "
        "case fails.",
        "mha-parity cases 'trained-*'",
        "listed",
    ),
    "compare": Page(
        "Judge the traces that `run --save-traces` wrote, in another environment or on another machine, as `run` "
        "judges its own.",
        "mha-parity compare traces/torch traces/tt",
        "every stage agrees",
        "a stage does not",
    ),
    "doctor": Page(
        "Say what is installed, on which devices the backends run and with which numerics settings, and what would be "
        "skipped or refused, with the reason and the way to get it.",
        "mha-parity doctor",
        "always, whatever is missing",
    ),
    "bugs": Page(
        "Print what is known of a class of mistakes: what it looks like, lines that reproduce it, and the fix. "
        "`diagnose` and failing tests name these pages.",
        "mha-parity bugs rope-pairs",
        "printed",
    ),
    "cache-size": Page(
        "Say how much memory the keys and values of a cache take.",
        "mha-parity cache-size --num-kv-heads 8 --head-dim 128 --capacity 8192 --num-layers 80",
        "computed",
    ),
    "convert": Page(
        "Convert the attention layers of a checkpoint from one layout to another, tensor by tensor, and keep or drop "
        "all other tensors. Nothing is guessed: what the file leaves open is an error that names the flag. DST is "
        "written whole or not at all.",
        "mha-parity convert model.safetensors flax.safetensors --from transformers.LLaMA \\\n"
        "      --to flax.nnx --prefix 'model.layers.{i}.self_attn' --num-heads 32",
        "written",
    ),
    "layouts": Page(
        "List the layouts of weights that are known, or show the tensors of one with their axes.",
        "mha-parity layouts transformers.LLaMA",
        "listed",
    ),
    "inspect": Page(
        "Show what a file holds: names, shapes, dtypes, the prefixes of attention layers, and the layouts that fit "
        "them.",
        "mha-parity inspect model.safetensors",
        "read, whether or not there is attention in it",
    ),
    "verify": Page(
        "Say whether two files hold the same attention, whatever their layouts: both are computed, and compared stage "
        "by stage, layer by layer where {i} in --prefix, or a stack, stands for many. What --from and --prefix say "
        "once holds for both files; said twice, for each in turn.",
        "mha-parity verify model.safetensors flax.safetensors --from transformers.LLaMA \\\n"
        "      --from flax.nnx --prefix model.layers.0.self_attn --num-heads 32",
        "the same attention",
        "not the same",
    ),
    "plot": Page(
        "Draw which query attends to which key, a heat map for each head, from a trace or from a layer and its input.",
        "mha-parity plot layer.safetensors attention.png --case causal --heads 0,1",
        "drawn",
    ),
    "conformance": Page(
        "Ask an attention for its conventions (mask polarity, causal alignment, empty rows, …) and show the promises "
        "that it breaks: of your own function or module, or of those of torch, JAX, Flax, Keras and Equinox.",
        "mha-parity conformance my_package.attention:attention --mask-true hides",
        "no broken promise",
        "a broken promise",
    ),
    "diagnose": Page(
        "Say why an implementation differs from the reference: which known mistake, or two at once, explains the "
        "difference.",
        "mha-parity diagnose my_package.attention:attention --weights layer.safetensors",
        "nothing differs by more than rounding",
        "something does",
    ),
    "selftest": Page(
        "Plant every known mistake in the siblings, and show whether it is noticed at its stage and named by the "
        "diagnosis.",
        "mha-parity selftest --backends torch",
        "every mistake was noticed",
        "one was not",
    ),
    "bench": Page(
        "Measure the siblings beside other libraries, in one process and in turn, and beside what the machine could "
        "do. Only ratios are claimed.",
        "mha-parity bench --what cores,decode --quick",
        "measured",
    ),
}

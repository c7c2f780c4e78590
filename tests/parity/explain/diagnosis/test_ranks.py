"""`mha-parity diagnose --mesh`: the stages of each rank, read from files."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.input_errors import Misuse, rejects
from helpers.ranks import SPEC, computed, cut, of_heads, of_tokens, problem_of

import parity
from parity.measure.core.weights import save_tensors, save_weights
from parity.use.cli.main import main


@pytest.fixture
def write(tmp_path):
    """Return a function that writes the stages of each rank to a file and returns the paths."""

    def written(ranks, **beside):
        paths = []
        for rank, stages in enumerate(ranks):
            paths.append(str(tmp_path / f"rank{rank}.safetensors"))
            tensors = {name: parity.to_numpy(x) for name, x in (dict(stages) | beside).items()}
            save_tensors(paths[-1], tensors, {})
        return paths

    return written


@pytest.fixture
def layer(tmp_path):
    """Return the path of a file with the weights of the whole layer, and its problem."""
    problem = problem_of(SPEC)
    save_weights(tmp_path / "layer.safetensors", problem.weights, SPEC)
    return str(tmp_path / "layer.safetensors"), problem


def test_rank_files_are_diagnosed(write, layer, tmp_path, capsys):
    """Files of correct ranks exit with 0; a bug exits with 1 and is named, also in the JSON."""
    weights, problem = layer
    query = problem.inputs["query"]
    right = ["diagnose", "--mesh", "tensor=4", "--weights", weights]
    assert main([*right, *write(of_heads(problem, 4), query=query)]) == 0
    assert "nothing differs by more than rounding on any rank" in capsys.readouterr().out
    wrong = write(of_heads(problem, 4, cut(problem, "sinks")), query=query)
    assert main([*right, *wrong, "--json", str(tmp_path / "found.json")]) == 1
    printed = capsys.readouterr().out
    assert "the layer is assumed to be causal; if it is not, pass --no-causal" in printed
    assert "First wrong stage of rank 1: attn_weights, " in printed
    assert "Likely bug: rank-first-sinks\n" in printed
    report = json.loads((tmp_path / "found.json").read_text())
    assert [comparison["rank"] for comparison in report["wrong"]] == [1, 2, 3]
    assert [finding["bugs"] for finding in report["findings"]] == [["rank-first-sinks"]]
    assert report["likely_bug"] == "rank-first-sinks"


def test_named_files_have_no_order_of_ranks(write, layer, tmp_path, capsys):
    """Files whose names differ in more than numbers may come in any order of these numbers."""
    weights, problem = layer
    paths = write(of_heads(problem, 2), query=problem.inputs["query"])
    renamed = []
    for path, name in zip(paths, ("left-9", "right-1"), strict=True):
        renamed.append(str(tmp_path / f"{name}.safetensors"))
        Path(path).rename(renamed[-1])
    command = ["diagnose", "--mesh", "tensor=2", "--weights", weights]
    assert main([*command, *renamed]) == 0
    assert "on any rank" in capsys.readouterr().out


def test_sequence_ranks_have_own_queries(write, layer, capsys):
    """Each file of a sequence mesh has its rank's query; files in reverse order are wrong."""
    weights, problem = layer
    query = problem.inputs["query"]
    parts = of_tokens(computed(problem.weights, SPEC, query), 2)
    ranks = [stages | {"query": x} for stages, x in zip(parts, np.split(query, 2, 1), strict=True)]
    paths = write(ranks)
    assert main(["diagnose", "--mesh", "sequence=2", "--weights", weights, *paths]) == 0
    assert (
        main(["diagnose", "--mesh", "sequence=2", "--weights", weights, *write(ranks[::-1])]) == 1
    )
    assert "of rank 0: " in capsys.readouterr().out


def test_ranks_of_a_case_need_no_weights(write, capsys):
    """With --case, ranks are diagnosed without --weights; a negated v on rank 1 is found."""
    problem = parity.make_problem("gqa-causal", "float32")
    ranks = of_heads(problem, 2)
    named = ["diagnose", "--mesh", "tensor=2", "--case", "gqa-causal"]
    assert main([*named, *write(ranks)]) == 0
    ranks[1] = ranks[1] | {"v": -ranks[1]["v"]}
    assert main([*named, *write(ranks)]) == 1
    assert "of rank 1: v, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ranks", "which", "more", "input_error"),
    [
        ("tensor=4", [0, 1, 3], [], rejects("--mesh tensor=4", "3: ")),
        ("tensor=4", [0, 1, 1, 3], [], rejects("each rank", "rank1")),
        ("tensor=4", [0, 2, 1, 3], [], rejects("files", "rank2")),
        ("heads=4", [0], [], rejects("--mesh", {"--mesh": "heads=4"})),
        ("tensor=1", [0], [], rejects("--mesh", {"--mesh": "tensor=1"})),
        (
            "tensor=4",
            [0, 1, 2, 3],
            ["--framework", "jax"],
            Misuse("--framework requires MODULE:FUNCTION"),
        ),
        (
            "tensor=4",
            [0, 1, 2, 3],
            ["--case", "gqa"],
            Misuse("--case cannot be combined with --weights"),
        ),
        (None, [0], ["--case", "gqa"], Misuse("--case requires --mesh")),
    ],
)
def test_bad_mesh_arguments_exit_with_2(ranks, which, more, input_error, write, layer, capsys):
    """Missing, repeated or misordered files and conflicting options exit with 2 and one line."""
    weights, problem = layer
    paths = write(of_heads(problem, 4), query=problem.inputs["query"])
    divided = ["--mesh", ranks, "--weights", weights] if ranks else []
    assert main(["diagnose", *divided, *more, *(paths[rank] for rank in which)]) == 2
    printed = capsys.readouterr().err
    assert input_error.is_printed_in(printed)
    assert printed.count("\n") == 1


def test_bad_rank_files_exit_with_2(write, layer, capsys):
    """Rank files without a usable query or stages, and invalid layer options, exit with 2."""
    weights, problem = layer
    query, ranks = problem.inputs["query"], of_heads(problem, 2)
    with_weights = ["diagnose", "--mesh", "tensor=2", "--weights", weights]

    def check(input_error, ranks, command=with_weights, **beside):
        assert main([*command, *write(ranks, **beside)]) == 2
        assert input_error.is_printed_in(capsys.readouterr().err)

    check(rejects("query", "none in"), ranks)
    check(
        rejects("query", "different"),
        [stages | {"query": query + rank} for rank, stages in enumerate(ranks)],
    )
    check(rejects("query", {"query.shape": (2, 8, 8)}), ranks, query=query[..., :8])
    check(rejects("query", "[(8, 32), (8, 32)]"), ranks, query=query[0])
    check(rejects("…rank0.safetensors", "out"), [{"out": ranks[0]["output"]}] * 2, query=query)
    check(rejects("…rank0.safetensors", "query"), [{}, {}], query=query)
    check(
        rejects("…", "grad.query"),
        [stages | {"grad.query": query} for stages in ranks],
        query=query,
    )
    of_case = ["diagnose", "--mesh", "tensor=2"]
    check(Misuse("--mesh requires --weights or --case"), ranks, of_case)
    check(rejects("--case", {"--case": "none"}), ranks, [*of_case, "--case", "none"])
    check(Misuse("--causal requires --weights"), ranks, [*of_case, "--case", "gqa", "--no-causal"])
    check(rejects("problem", "decode"), ranks, [*of_case, "--case", "decode"])


def test_rank_without_known_stage_raises():
    """`diagnose_ranks` raises an error if a rank has no stage that it can compare."""
    problem = problem_of(replace(SPEC, gate=None))
    with rejects("observed", "['out'] of rank 1"):
        parity.diagnose_ranks([{"output": np.ones(1)}, {"out": np.ones(1)}], problem, tensor=2)

"""`@sample`: which rows of a test exist, and that each row belongs to one tier with
`SAMPLES=all`.
"""

import sys

import pytest
from helpers.samples import sample

CONFTEST = """
import pytest

pytest_plugins = ["helpers.samples"]

@pytest.fixture(params=["jax", "torch"])
def sibling(request):
    return request.param
"""


@pytest.fixture
def suite(pytester, monkeypatch):
    """A folder with tests of one file; its rows are those that a run collects."""
    monkeypatch.delenv("SAMPLES", raising=False)
    monkeypatch.setattr(
        sys, "dont_write_bytecode", True
    )  # files of the same second and size would share it
    pytester.makeini("[pytest]\nmarkers =\n    thorough: more\n    nightly: all the rest")
    pytester.makeconftest(CONFTEST)
    return pytester


def rows_of(suite, source, *arguments, mark="thorough"):
    """Return the rows of the tests, and those with the mark."""
    source = (
        f"import pytest\nfrom helpers.samples import sample\nparametrize = "
        f"pytest.mark.parametrize\n{source}"
    )
    suite.makepyfile(test_it=source)
    items, _ = suite.inline_genitems(*arguments)
    rows = [item.name for item in items]
    return rows, [item.name for item in items if item.get_closest_marker(mark)]


PRODUCT = """
@sample({sample})
@parametrize("letter", "abc")
@parametrize("number", [1, 2, 3])
def test_product(letter, number, sibling): pass
"""


def test_values_restrict_rows(suite):
    """With `letter=["b"], number=[1, 3]`, the test has only rows with these values, for both
    backends.
    """
    rows, _ = rows_of(suite, PRODUCT.format(sample='letter=["b"], number=[1, 3]'))
    assert sorted(rows) == [
        f"test_product[{name}-{n}-b]" for name in ("jax", "torch") for n in (1, 3)
    ]


def test_function_restricts_rows(suite):
    """With `where=`, the test has only rows for which the function returns True, for both
    backends.
    """
    rows, _ = rows_of(
        suite, PRODUCT.format(sample="where=lambda number, letter: letter * number == 'cc'")
    )
    assert sorted(rows) == ["test_product[jax-2-c]", "test_product[torch-2-c]"]


def test_jax_argument_sets_jax_rows(suite):
    """`jax=2` limits the rows of JAX to 2 of 9, and `5, jax=0` leaves 5 rows, none of JAX."""
    rows, _ = rows_of(suite, PRODUCT.format(sample="jax=2"))
    in_jax = [row for row in rows if "jax" in row]
    assert (len(in_jax), len(rows)) == (2, 11)
    rows, _ = rows_of(suite, PRODUCT.format(sample="5, jax=0"))
    assert len(rows) == 5
    assert "jax" not in "".join(rows)


def test_nine_rows_cover_all_pairs(suite):
    """Nine rows, the fewest possible, have every letter with every number, and each of both
    with each backend.
    """
    rows, _ = rows_of(suite, PRODUCT.format(sample="9"))
    parts = [row.removeprefix("test_product[").rstrip("]").split("-") for row in rows]
    assert len(parts) == 9
    assert len({(number, letter) for _, number, letter in parts}) == 9
    assert len({(sibling, number) for sibling, number, _ in parts}) == 6
    assert len({(sibling, letter) for sibling, _, letter in parts}) == 6


def test_three_rows_cover_every_value(suite):
    """Three rows have every value of every parameter."""
    rows, _ = rows_of(suite, PRODUCT.format(sample="3"))
    assert all(
        value in "".join(rows) for value in ("jax", "torch", "1", "2", "3", "-a", "-b", "-c")
    )


VALUES = {"letter": list("abcd"), "number": [1, 2, 3, 4]}
REVERSED = {name: values[::-1] for name, values in VALUES.items()}


def four_rows(suite, test, names, values):
    """Return the four rows of a test with this name, whose decorators are in this order, as sets of
    values.
    """
    decorators = "\n".join(f"@parametrize({name!r}, {values[name]})" for name in names)
    rows, _ = rows_of(suite, f"@sample(4)\n{decorators}\ndef {test}(letter, number): pass")
    assert len(rows) == 4
    return {frozenset(row.rstrip("]").partition("[")[2].split("-")) for row in rows}


@pytest.mark.parametrize(
    ("test", "names", "values"),
    [
        ("test_renamed", ["letter", "number"], VALUES),
        ("test_it", ["number", "letter"], VALUES),
        ("test_it", ["letter", "number"], REVERSED),
    ],
    ids=["name", "decorators", "values"],
)
def test_choice_does_not_depend_on_order(suite, test, names, values):
    """The choice depends neither on the test's name nor on the order of its decorators or
    values.
    """
    assert four_rows(suite, test, names, values) == four_rows(
        suite, "test_it", ["letter", "number"], VALUES
    )


def test_seed_changes_the_choice(suite):
    """Four seeds choose four different sets of rows."""
    seeds = {
        tuple(rows_of(suite, PRODUCT.format(sample=f"4, seed={seed}"))[0]) for seed in range(4)
    }
    assert len(seeds) == 4


@sample(3)
@pytest.mark.parametrize(
    "sampled", ["4", "9", 'letter=["b"]', "jax=1", "5, jax=0", 'letter=["b"], jax=1']
)
def test_each_row_belongs_to_one_tier(suite, monkeypatch, sampled):
    """The thorough ones are those that SAMPLES=thorough adds, and the nightly ones all others."""
    source = PRODUCT.format(sample=sampled)
    short, marked = rows_of(suite, source)
    assert marked == []
    monkeypatch.setenv("SAMPLES", "thorough")
    both, thorough = rows_of(suite, source)
    assert set(both) - set(thorough) == set(short)
    assert rows_of(suite, source, mark="nightly")[1] == []
    monkeypatch.setenv("SAMPLES", "all")
    every_row, still_thorough = rows_of(suite, source)
    nightly = rows_of(suite, source, mark="nightly")[1]
    assert len(every_row) == 18
    assert still_thorough == thorough
    assert sorted(every_row) == sorted([*short, *thorough, *nightly])


@pytest.mark.parametrize(
    ("sampled", "in_jax", "in_torch"),
    [
        ("jax=1", 2, 9),
        ("jax=0", 1, 9),  # one, although the sample has none
        ("3, jax=1", 2, 4),
        ('letter=["b"], number=[1, 2], jax=1', 2, 4),
    ],
)
def test_thorough_rows_are_as_many_again(suite, monkeypatch, sampled, in_jax, in_torch):
    """Both numbers cover both tiers; rows in JAX are counted apart where the sample does
    that.
    """
    monkeypatch.setenv("SAMPLES", "thorough")
    rows, _ = rows_of(suite, PRODUCT.format(sample=sampled))
    assert sum("jax" in row for row in rows) == in_jax
    assert sum("torch" in row for row in rows) == in_torch


def test_thorough_rows_have_new_pairs(suite, monkeypatch):
    """Three rows have each value once, and three more have other pairs."""
    monkeypatch.setenv("SAMPLES", "thorough")
    rows, _ = rows_of(suite, PRODUCT.format(sample="3"))
    pairs = {tuple(row.rstrip("]").split("-")[1:]) for row in rows}
    assert len(pairs) == len(rows) == 6


def test_thorough_rows_ignore_the_order(suite, monkeypatch):
    """CI runs the same rows each time."""
    monkeypatch.setenv("SAMPLES", "thorough")
    values = 'letter=["b"], number=[1]'
    rows, _ = rows_of(suite, PRODUCT.format(sample=values))
    reverse = PRODUCT.replace('"abc"', '"cba"').replace("[1, 2, 3]", "[3, 2, 1]")
    again, _ = rows_of(suite, reverse.format(sample=values))
    assert sorted(rows) == sorted(again)
    assert len(rows) == 4


def test_named_row_outside_sample_runs(suite):
    """A row outside the sample is collected if the command line names it."""
    sampled, _ = rows_of(suite, PRODUCT.format(sample='letter=["b"]'))
    name = "test_product[jax-2-a]"
    assert name not in sampled
    assert rows_of(suite, PRODUCT.format(sample='letter=["b"]'), f"test_it.py::{name}")[0] == [name]


def test_a_row_that_is_named_keeps_its_tier(suite, monkeypatch):
    source = PRODUCT.format(sample="2")
    monkeypatch.setenv("SAMPLES", "all")
    nightly = rows_of(suite, source, mark="nightly")[1]
    monkeypatch.delenv("SAMPLES")
    assert rows_of(suite, source, f"test_it.py::{nightly[0]}", mark="nightly") == (
        [nightly[0]],
        [nightly[0]],
    )


@pytest.mark.parametrize(
    ("sampled", "problem"),
    [
        ('color=["red"]', "no such parameters: ['color']"),
        ("where=lambda color: True", "no such parameters: ['color']"),
        ('letter=["b", "z"]', "letter is never ['z']"),
        ("where=lambda letter: False", "no row is left"),
        ("18", "the number is 18, of 18 rows"),
        ("jax=9", "jax is 9, of 9 rows"),
    ],
)
def test_impossible_sample_is_an_error(suite, sampled, problem):
    """A sample with an unknown parameter or value, or without effect, is an error: a renamed
    value would leave rows out.
    """
    source = (
        f"import pytest\nfrom helpers.samples import sample\nparametrize = "
        f"pytest.mark.parametrize\n{PRODUCT}"
    )
    suite.makepyfile(test_it=source.format(sample=sampled))
    result = suite.runpytest()
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert f"@sample of test_product: {problem}" in result.stdout.str()


@pytest.mark.parametrize("mark", ["thorough", "nightly"])
def test_thorough_row_in_sample_is_an_error(suite, mark):
    """A sampled test with a row marked thorough is an error: two decisions would determine
    whether it runs.
    """
    suite.makepyfile(
        test_it=f"""
        import pytest
        from helpers.samples import sample

        @sample(2)
        @pytest.mark.parametrize("x", [1, 2, pytest.param(3, marks=pytest.mark.{mark})])
        def test_x(x): pass
        """
    )
    result = suite.runpytest()
    assert f"@sample of test_x: a row of it is marked {mark}" in result.stdout.str()


def test_two_samples_are_an_error(suite):
    """Two @sample decorators on one test are an error."""
    suite.makepyfile(
        test_it="""
        import pytest
        from helpers.samples import sample

        @sample(x=[1])
        @sample(1)
        @pytest.mark.parametrize("x", [1, 2])
        def test_x(x): pass
        """
    )
    result = suite.runpytest()
    assert "@sample of test_x: a test has one @sample" in result.stdout.str()


@pytest.mark.parametrize(
    ("samples", "head", "outside"),
    [
        (None, "samples: the rows of each test's @sample*", 14),
        ("thorough", "samples: 2 times the rows of each test's @sample*", 10),
    ],
)
def test_number_of_omitted_rows_is_printed(suite, monkeypatch, samples, head, outside):
    """The report of a run has the number of rows outside of samples, 14 of 18."""
    rows_of(suite, PRODUCT.format(sample="4"))
    if samples is not None:
        monkeypatch.setenv("SAMPLES", samples)
    result = suite.runpytest()
    result.stdout.fnmatch_lines([head, f"{outside} rows are outside of samples"])
    result.assert_outcomes(passed=18 - outside)


def test_all_rows_leave_none_out(suite, monkeypatch):
    rows_of(suite, PRODUCT.format(sample="4"))
    monkeypatch.setenv("SAMPLES", "all")
    result = suite.runpytest()
    result.stdout.fnmatch_lines(["samples: all rows"])
    assert "outside of samples" not in result.stdout.str()
    result.assert_outcomes(passed=18)


def test_invalid_samples_variable_is_error(suite, monkeypatch):
    """SAMPLES=9 is an error that names the valid value, 'all'."""
    monkeypatch.setenv("SAMPLES", "9")
    suite.makepyfile("def test_x(): pass")
    result = suite.runpytest()
    assert "SAMPLES is 'thorough', 'all' or not set, not '9'" in result.stderr.str()

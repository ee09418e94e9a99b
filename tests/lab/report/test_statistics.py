"""The laboratory's statistics: against the literature, against scipy, and at the edges."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from collections.abc import Callable, Sequence

import hypothesis.strategies as st
import numpy as np
import pytest
import scipy.stats
from hypothesis import assume, given, settings

from dropconnectpp.errors import ArgumentError, DropConnectError
from dropconnectpp.lab.report.statistics import (
    Comparison,
    SampleError,
    holm,
    paired,
    sentence,
    student,
    summarise,
    welch,
)

# Hours of sleep gained with two drugs by ten patients: Student, "The probable error of a mean" (1908).
FIRST = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
SECOND = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]

Test = Callable[[Sequence[float], Sequence[float]], Comparison]


def by_place(values: Sequence[float]) -> dict[int, float]:
    return dict(enumerate(values))


def paired_by_place(a: Sequence[float], b: Sequence[float]) -> Comparison:
    return paired(by_place(a), by_place(b))


TESTS: dict[str, Test] = {"Student": student, "Welch": welch, "paired": paired_by_place}
each_test = pytest.mark.parametrize("test", TESTS.values(), ids=TESTS.keys())
accuracies = st.floats(0.0, 100.0).map(lambda value: round(value, 3))
samples = st.lists(accuracies, min_size=2, max_size=30)


def spread(values: Sequence[float]) -> bool:
    return max(values) - min(values) > 0.01


# ------------------------------------------------------------------------------------------- known answers


@pytest.mark.parametrize(
    ("name", "t", "degrees", "p", "low", "high"),
    [
        ("paired", 4.0621, 9, 0.002833, 0.7001142, 2.4598858),
        ("Student", 1.8608, 18, 0.07919, -0.203874, 3.363874),
        ("Welch", 1.8608, 17.776, 0.07939, -0.2054832, 3.3654832),
    ],
)
def test_students_sleep_data(name: str, t: float, degrees: float, p: float, low: float, high: float) -> None:
    comparison = TESTS[name](SECOND, FIRST)
    assert comparison.test == name
    assert (comparison.n_a, comparison.n_b, comparison.unpaired) == (10, 10, 0)
    assert comparison.difference == pytest.approx(1.58)
    assert comparison.t == pytest.approx(t, abs=5e-5)
    assert comparison.degrees_of_freedom == pytest.approx(degrees, abs=5e-4)
    assert comparison.p == pytest.approx(p, rel=2e-4)
    assert comparison.interval == pytest.approx((low, high), abs=1e-6)


def test_effect_sizes_of_students_sleep_data() -> None:
    # Cohen's d is t / sqrt(n / 2) for two samples of n, and d_z is t / sqrt(n) for n pairs.
    assert student(SECOND, FIRST).effect_size == pytest.approx(1.8608 / math.sqrt(5), abs=5e-5)
    assert welch(SECOND, FIRST).effect_size == pytest.approx(1.8608 / math.sqrt(5), abs=5e-5)
    assert paired_by_place(SECOND, FIRST).effect_size == pytest.approx(4.0621 / math.sqrt(10), abs=5e-5)


def test_a_comparison_by_hand() -> None:
    # Means 2 and 5, squared deviations 2 and 8: pooled variance 10/4, standard error sqrt(10/4 * 2/3).
    comparison = student([1.0, 2.0, 3.0], [3.0, 5.0, 7.0])
    assert comparison.t == pytest.approx(-3.0 / math.sqrt(10.0 / 6.0))
    assert comparison.effect_size == pytest.approx(-3.0 / math.sqrt(2.5))
    # Variances of the means 1/3 and 4/3: degrees (5/3)^2 / ((1/9 + 16/9) / 2).
    assert welch([1.0, 2.0, 3.0], [3.0, 5.0, 7.0]).degrees_of_freedom == pytest.approx(50.0 / 17.0)


def test_a_summary_by_hand() -> None:
    summary = summarise([2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0])
    assert (summary.n, summary.mean) == (8, 5.0)
    assert summary.standard_deviation == pytest.approx(math.sqrt(32.0 / 7.0))
    half = 2.364624 * math.sqrt(32.0 / 56.0)  # t of 7 degrees from the printed tables
    assert summary.interval == pytest.approx((5.0 - half, 5.0 + half), abs=1e-6)


# ----------------------------------------------------------------------------------------- against scipy


@settings(deadline=None)
@given(samples)
def test_summaries_are_scipys(values: list[float]) -> None:
    assume(spread(values))
    summary = summarise(values)
    error = scipy.stats.sem(values)
    assert summary.mean == pytest.approx(np.mean(values))
    assert summary.standard_deviation == pytest.approx(np.std(values, ddof=1))
    expected = scipy.stats.t.interval(0.95, len(values) - 1, loc=np.mean(values), scale=error)
    assert summary.interval == pytest.approx(expected, rel=1e-9, abs=1e-9)


@settings(deadline=None)
@given(samples, samples, st.sampled_from(list(TESTS)))
def test_comparisons_are_scipys(a: list[float], b: list[float], name: str) -> None:
    if name == "paired":
        a, b = a[: len(b)], b[: len(a)]
        assume(spread([x - y for x, y in zip(a, b, strict=True)]))
        expected = scipy.stats.ttest_rel(a, b)
    else:
        assume(spread(a) and spread(b))
        expected = scipy.stats.ttest_ind(a, b, equal_var=name == "Student")
    comparison = TESTS[name](a, b)
    assert comparison.t == pytest.approx(expected.statistic, rel=1e-7, abs=1e-9)
    assert comparison.degrees_of_freedom == pytest.approx(expected.df, rel=1e-7)
    assert comparison.p == pytest.approx(expected.pvalue, rel=1e-6, abs=1e-12)
    interval = expected.confidence_interval(0.95)
    assert comparison.interval == pytest.approx((interval.low, interval.high), rel=1e-6, abs=1e-7)
    low, high = comparison.interval
    if abs(comparison.p - 0.05) > 1e-9:
        assert (comparison.p < 0.05) == (not low <= 0.0 <= high)


# ------------------------------------------------------------------------------------------- invariances


@each_test
@settings(deadline=None)
@given(values=st.lists(st.tuples(accuracies, accuracies), min_size=2, max_size=20))
def test_swapping_the_sides_swaps_the_signs(test: Test, values: list[tuple[float, float]]) -> None:
    a, b = [x for x, _ in values], [y for _, y in values]
    assume(spread(a) and spread(b) and spread([x - y for x, y in values]))
    one, other = test(a, b), test(b, a)
    assert one.difference == pytest.approx(-other.difference)
    assert one.t == pytest.approx(-other.t)
    assert one.effect_size == pytest.approx(-other.effect_size)
    assert one.p == pytest.approx(other.p)
    assert one.interval == pytest.approx((-other.interval[1], -other.interval[0]))


@each_test
@settings(deadline=None)
@given(
    values=st.lists(st.tuples(accuracies, accuracies), min_size=2, max_size=20),
    shift=st.floats(-100.0, 100.0),
    scale=st.floats(0.01, 100.0),
)
def test_shift_and_scale_change_no_verdict(
    test: Test, values: list[tuple[float, float]], shift: float, scale: float
) -> None:
    a, b = [x for x, _ in values], [y for _, y in values]
    assume(spread(a) and spread(b) and spread([x - y for x, y in values]))
    one = test(a, b)
    other = test([scale * x + shift for x in a], [scale * y + shift for y in b])
    assert other.difference == pytest.approx(scale * one.difference, abs=1e-9)
    assert other.t == pytest.approx(one.t, rel=1e-6, abs=1e-6)
    assert other.p == pytest.approx(one.p, rel=1e-5, abs=1e-9)
    assert other.effect_size == pytest.approx(one.effect_size, rel=1e-6, abs=1e-6)


@each_test
def test_the_order_of_the_values_changes_nothing(test: Test) -> None:
    order = [3, 1, 4, 0, 5, 9, 2, 6, 8, 7]
    assert test([FIRST[i] for i in order], [SECOND[i] for i in order]) == test(FIRST, SECOND)
    assert summarise(FIRST[::-1]) == summarise(FIRST)


@each_test
def test_arrays_do_as_well_as_lists(test: Test) -> None:
    comparison = test(np.array(FIRST, np.float64), np.array(SECOND, np.float64))  # type: ignore[arg-type]
    assert comparison == test(FIRST, SECOND)
    assert all(type(value) in (str, int, float, tuple) for value in dataclasses.astuple(comparison))


@pytest.mark.parametrize("size", [1e-200, 1e290])
@each_test
def test_no_size_overflows(test: Test, size: float) -> None:
    one, other = test(FIRST, SECOND), test([size * x for x in FIRST], [size * x for x in SECOND])
    assert (other.t, other.p) == pytest.approx((one.t, one.p))
    assert other.degrees_of_freedom == pytest.approx(one.degrees_of_freedom)


# ------------------------------------------------------------------------------------------------- pairs


def test_pairs_are_found_by_replica_and_the_rest_is_counted() -> None:
    a = by_place(SECOND) | {10: 50.0}
    b = {replica: FIRST[replica] for replica in reversed(range(10))} | {11: -50.0, 12: 0.0}
    comparison = paired(a, b)
    assert comparison == dataclasses.replace(paired_by_place(SECOND, FIRST), unpaired=3)


def test_pairs_need_common_replicas() -> None:
    with pytest.raises(SampleError, match=r"at least 2 replicas that both methods have, got 1 \(2 of a and 3 of b\)"):
        paired({0: 1.0, 1: 2.0}, {1: 2.0, 2: 3.0, 3: 4.0})


# ------------------------------------------------------------------------------------------------- edges


def test_one_value_has_no_spread() -> None:
    summary = summarise([3.5])
    assert (summary.n, summary.mean, summary.standard_deviation, summary.interval) == (1, 3.5, None, None)


def test_equal_values_have_the_spread_zero() -> None:
    summary = summarise([0.1] * 7)  # whose plain sum over 7 is not 0.1
    assert (summary.mean, summary.standard_deviation, summary.interval) == (0.1, 0.0, (0.1, 0.1))


@each_test
@pytest.mark.parametrize("value", [0.0, 0.1, -91.3])
def test_equal_samples_cannot_be_told_apart(test: Test, value: float) -> None:
    comparison = test([value] * 5, [value] * 5)
    assert (comparison.difference, comparison.interval) == (0.0, (0.0, 0.0))
    assert (comparison.t, comparison.p, comparison.effect_size) == (0.0, 1.0, 0.0)
    assert "cannot be told from" in sentence(comparison, "A", "B", "points")


@each_test
def test_a_difference_without_spread_is_no_test(test: Test) -> None:
    with pytest.raises(SampleError, match=r"differ by -0\.1 every time \(means 0\.3 and 0\.4\), and without"):
        test([0.3] * 5, [0.4] * 5)


def test_rounding_is_no_spread() -> None:
    a = [0.1, 0.7, 0.3, 1.1]
    shifted = [value + 0.2 for value in a]
    assert len({x - y for x, y in zip(shifted, a, strict=True)}) > 1
    with pytest.raises(SampleError, match=r"differ by 0\.2 every time"):
        paired_by_place(shifted, a)


def test_one_side_may_be_constant() -> None:
    comparison = welch([1.0, 1.0, 1.0], [1.0, 2.0, 3.0])
    assert (comparison.degrees_of_freedom, comparison.t) == pytest.approx((2.0, -math.sqrt(3.0)))
    assert student([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]).degrees_of_freedom == 4.0


@each_test
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e305])
def test_values_that_are_not_finite_are_refused_by_place(test: Test, bad: float) -> None:
    with pytest.raises(SampleError, match=r"b must hold finite numbers .* (at position|for replica) 2\. Leave runs"):
        test([1.0, 2.0, 3.0], [1.0, 2.0, bad])
    with pytest.raises(SampleError, match="values must hold finite numbers"):
        summarise([bad])


def test_too_few_values_are_refused() -> None:
    with pytest.raises(SampleError, match="values needs at least 1 value, got 0"):
        summarise([])
    for test in (student, welch):
        with pytest.raises(SampleError, match="a needs at least 2 values, got 1"):
            test([1.0], [1.0, 2.0])
        with pytest.raises(SampleError, match="b needs at least 2 values, got 0"):
            test([1.0, 2.0], [])
    assert issubclass(SampleError, DropConnectError)
    assert issubclass(SampleError, ValueError)


# -------------------------------------------------------------------------------------------------- Holm


def test_holm_by_hand() -> None:
    # Sorted: 0.01 x 4, 0.013 x 3 (raised to 0.04), 0.02 x 2 (0.04), 0.5 x 1.
    assert holm([0.02, 0.01, 0.5, 0.013]) == pytest.approx((0.04, 0.04, 0.5, 0.04))
    assert holm([0.6, 0.7]) == (1.0, 1.0)
    assert holm([0.03]) == (0.03,)
    assert holm([]) == ()


@given(st.lists(st.floats(0.0, 1.0), max_size=12))
def test_holm_keeps_the_order_and_never_lowers(p_values: list[float]) -> None:
    adjusted = holm(p_values)
    assert all(p <= q <= min(1.0, len(p_values) * p) for p, q in zip(p_values, adjusted, strict=True))
    ranked = sorted(zip(p_values, adjusted, strict=True))
    assert [q for _, q in ranked] == sorted(adjusted)
    assert holm(p_values[::-1]) == adjusted[::-1]


@pytest.mark.parametrize("bad", [-0.1, 1.1, math.nan])
def test_holm_refuses_what_is_no_probability(bad: float) -> None:
    with pytest.raises(ArgumentError, match=r"p_values must lie in \[0, 1\], got .* at position 1"):
        holm([0.5, bad])


# --------------------------------------------------------------------------------------------- sentences

BETTER = Comparison(
    test="Welch",
    n_a=50,
    n_b=49,
    difference=1.1,
    interval=(0.8, 1.4),
    t=3.7,
    degrees_of_freedom=97.0,
    p=0.00031,
    effect_size=0.7,
)
NUMBERS = "by 1.10 points, 95% interval 0.80 to 1.40, p = 0.0003 (Welch, n = 50 and 49)"


def negated(comparison: Comparison) -> Comparison:
    low, high = comparison.interval
    return dataclasses.replace(comparison, difference=-comparison.difference, interval=(-high, -low))


def test_the_winner_comes_first() -> None:
    assert sentence(BETTER, "A", "B", "points") == f"A beats B {NUMBERS}"
    assert sentence(negated(BETTER), "A", "B", "points") == f"B beats A {NUMBERS}"


def test_lower_errors_win() -> None:
    assert sentence(BETTER, "A", "B", "points", higher_is_better=False) == f"B beats A {NUMBERS}"
    assert sentence(negated(BETTER), "A", "B", "points", higher_is_better=False) == f"A beats B {NUMBERS}"


def test_no_winner_without_significance() -> None:
    weak = dataclasses.replace(BETTER, difference=-0.001, interval=(-0.3, 0.298), p=0.05)
    expected = (
        "A cannot be told from B: difference 0.00 %, 95% interval -0.30 to 0.30, p = 0.0500 (Welch, n = 50 and 49)"
    )
    assert sentence(weak, "A", "B", "%") == expected


def test_the_adjusted_p_decides_where_it_is_given() -> None:
    text = sentence(BETTER, "A", "B", "points", adjusted_p=0.062)
    assert text.startswith("A cannot be told from B: difference 1.10 points, 95% interval 0.80 to 1.40, ")
    assert "p = 0.0003, Holm-adjusted p = 0.0620 (" in text
    assert sentence(BETTER, "A", "B", "points", adjusted_p=0.01).startswith("A beats B")


def test_tiny_p_and_pairs_and_digits() -> None:
    tiny = dataclasses.replace(BETTER, test="paired", n_b=50, p=1e-30)
    assert sentence(tiny, "A", "B", "nats", digits=3) == (
        "A beats B by 1.100 nats, 95% interval 0.800 to 1.400, p < 0.0001 (paired, n = 50 pairs)"
    )
    left_out = dataclasses.replace(tiny, unpaired=2)
    assert sentence(left_out, "A", "B", "nats").endswith("(paired, n = 50 pairs, 2 without a partner left out)")


def test_reports_are_built_without_torch() -> None:
    check = "import sys; import dropconnectpp.lab.report.statistics; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

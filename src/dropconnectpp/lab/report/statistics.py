"""Means, confidence intervals and significance tests of plain numbers: what a table may claim.

A sample is a sequence of finite numbers, one for each replica; the order of its values never matters.
Results are frozen dataclasses of plain floats. No torch: a report can be rebuilt on any machine.

| function   | question                                                         | assumes          |
| ---------- | ---------------------------------------------------------------- | ---------------- |
| summarise  | where does the mean lie?                                         | normal means     |
| student    | do two means differ? The paper's test                            | equal variances  |
| welch      | do two means differ?                                             |                  |
| paired     | do two methods differ on the same starts and orders of examples? | pairs by replica |
| resampled  | do two methods differ on splits that share examples?             | pairs by split   |
| holm       | which of several differences remain significant together?        |                  |
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

# scipy.special has Student's distribution too, and scipy.stats takes seconds to import.
from scipy import special

from dropconnectpp.errors import ArgumentError, DropConnectError

SIGNIFICANCE = 0.05
"""How often a difference may be claimed although there is none; intervals cover the other 95%."""
LARGEST = 1e300
"""Values of this size and above are refused like infinity: their sums overflow."""
ROUNDING = 1e-15
"""A standard error below this share of the means is rounding of equal numbers, not spread."""

TestName = Literal["Student", "Welch", "paired", "corrected"]
"""The tests, as sentences name them."""

Replica = TypeVar("Replica", bound=Hashable)


class SampleError(DropConnectError, ValueError):
    """The values cannot answer the question; the message says which values, and what is missing."""


@dataclass(frozen=True)
class Summary:
    """A sample in one line of a table. A single value has a mean but no spread: None."""

    n: int
    mean: float
    standard_deviation: float | None
    """With n - 1 in the denominator."""
    interval: tuple[float, float] | None
    """95% confidence interval of the mean, by Student's t."""


@dataclass(frozen=True)
class Comparison:
    """Two samples compared. The difference is a minus b, in the samples' own unit."""

    test: TestName
    n_a: int
    n_b: int
    difference: float
    interval: tuple[float, float]
    """95% confidence interval of the difference; it excludes 0 exactly when p is below 0.05."""
    t: float
    degrees_of_freedom: float
    p: float
    """Two-sided."""
    effect_size: float
    """The difference in standard deviations: Cohen's d (from the pooled variance for Student, the mean
    variance for Welch), or d_z (from the differences) for pairs."""
    unpaired: int = 0
    """Replicas that a paired test left out because only one of the methods has them."""


def summarise(values: Sequence[float]) -> Summary:
    """Mean, standard deviation and 95% confidence interval of a sample.

    Raises `SampleError` if there are no values, or values that are not finite.

    >>> summarise([1.0, 2.0, 3.0])
    Summary(n=3, mean=2.0, standard_deviation=1.0, interval=(-0.484..., 4.484...))
    """
    sample = _Sample.of("values", values, least=1)
    if sample.n == 1:
        return Summary(1, sample.mean, None, None)
    half = _quantile(sample.n - 1) * sample.standard_error
    return Summary(sample.n, sample.mean, sample.standard_deviation, (sample.mean - half, sample.mean + half))


def student(a: Sequence[float], b: Sequence[float]) -> Comparison:
    """Student's two-sample t test with pooled variance: the paper's test, for equal variances.

    Raises `SampleError` for fewer than two values on a side, for values that are not finite, and for
    two different means without any spread. If all values are equal, t = 0 and p = 1.

    >>> student([1.0, 2.0, 3.0], [4.0, 5.0, 6.0]).t
    -3.674...
    """
    first, second = _Sample.of("a", a), _Sample.of("b", b)
    degrees = first.n + second.n - 2
    pooled = math.hypot(first.norm, second.norm) / math.sqrt(degrees)
    error = pooled * math.sqrt(1.0 / first.n + 1.0 / second.n)
    return _compare("Student", first, second, error, degrees, pooled)


def welch(a: Sequence[float], b: Sequence[float]) -> Comparison:
    """Welch's two-sample t test: like `student`, but each side has its own variance.

    >>> comparison = welch([1.0, 2.0, 3.0], [4.0, 6.0, 8.0])
    >>> round(comparison.degrees_of_freedom, 2), round(comparison.p, 4)
    (2.94, 0.0548)
    """
    first, second = _Sample.of("a", a), _Sample.of("b", b)
    error = math.hypot(first.standard_error, second.standard_error)
    # Shares of the variance, so that nothing overflows; 1 / error would.
    share = (first.standard_error / error) ** 2 if error > 0.0 else 0.5
    degrees = 1.0 / (share**2 / (first.n - 1) + (1.0 - share) ** 2 / (second.n - 1))
    deviation = math.hypot(first.standard_deviation, second.standard_deviation) / math.sqrt(2.0)
    return _compare("Welch", first, second, error, degrees, deviation)


def paired(a: Mapping[Replica, float], b: Mapping[Replica, float]) -> Comparison:
    """Student's t test of the differences between a and b on the replicas that both have.

    Replica r has the same start and order of examples under every method, so this source of variation
    cancels in the differences.

    >>> comparison = paired({0: 1.0, 1: 2.0, 2: 3.5}, {0: 0.5, 1: 1.0, 2: 2.0, 3: 9.0})
    >>> comparison.difference, comparison.n_a, comparison.unpaired
    (1.0, 3, 1)
    """
    common = [key for key in a if key in b]
    unpaired = len(a) + len(b) - 2 * len(common)
    if len(common) < 2:
        raise SampleError(
            f"paired needs at least 2 replicas that both methods have, got {len(common)} ({len(a)} of a and {len(b)} "
            "of b). Run both methods on the same replicas, or use welch."
        )
    first = _Sample.of("a", [a[key] for key in common], replicas=common)
    second = _Sample.of("b", [b[key] for key in common], replicas=common)
    differences = _Sample.of("a - b", [float(a[key]) - float(b[key]) for key in common], replicas=common)
    return _compare(
        "paired",
        first,
        second,
        differences.standard_error,
        differences.n - 1,
        differences.standard_deviation,
        difference=differences.mean,
        unpaired=unpaired,
    )


def resampled(a: Mapping[Replica, float], b: Mapping[Replica, float], test_share: float) -> Comparison:
    """`paired`, for random splits of one data set: their training sets overlap, so differences are not independent.

    The variance of the mean difference is (1/n + test_share) times that of a difference, Nadeau and Bengio (2003);
    ``test_share`` is the number of test examples over that of training examples.

    >>> a, b = {0: 1.0, 1: 2.0, 2: 3.5}, {0: 0.5, 1: 1.0, 2: 2.0}
    >>> round(paired(a, b).p, 3), round(resampled(a, b, 1 / 9).p, 3)
    (0.074, 0.095)
    """
    if not 0.0 <= test_share < math.inf:
        raise ArgumentError(f"test_share must be a finite number of at least 0, got {test_share}.")
    found = paired(a, b)
    wider = math.sqrt(1.0 + found.n_a * test_share)
    t = found.t / wider
    half = 0.5 * (found.interval[1] - found.interval[0]) * wider
    return replace(
        found,
        test="corrected",
        t=t,
        p=min(1.0, 2.0 * float(special.stdtr(found.degrees_of_freedom, -abs(t)))),
        interval=(found.difference - half, found.difference + half),
    )


def holm(p_values: Sequence[float]) -> tuple[float, ...]:
    """Holm's (1979) step-down adjustment: compared with 0.05, the adjusted values err together in at most 5% of cases.

    >>> [round(p, 4) for p in holm([0.01, 0.04, 0.03, 0.005])]
    [0.03, 0.06, 0.06, 0.02]
    """
    values = [float(p) for p in p_values]
    for place, p in enumerate(values):
        if not 0.0 <= p <= 1.0:
            raise ArgumentError(f"p_values must lie in [0, 1], got {p} at position {place}.")
    adjusted = [0.0] * len(values)
    largest = 0.0
    for rank, place in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        largest = max(largest, min(1.0, (len(values) - rank) * values[place]))
        adjusted[place] = largest
    return tuple(adjusted)


def concordance(raters: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """Kendall's W, whether raters put the same places first, and p of its chi-squared approximation; ties are counted.

    None where no rater tells places apart.

    >>> concordance([[1, 2, 3, 4], [1, 2, 3, 4], [2, 1, 3, 4]])
    (0.9111111111111111, 0.04205418289496614)
    """
    m, n = len(raters), len(raters[0])
    totals = [0.0] * n
    tied = 0.0
    for values in raters:
        order = sorted(range(n), key=values.__getitem__)
        first = 0
        while first < n:
            last = first
            while last + 1 < n and values[order[last + 1]] == values[order[first]]:
                last += 1
            for place in order[first : last + 1]:
                totals[place] += 1.0 + (first + last) / 2.0
            size = last - first + 1
            tied += size**3 - size
            first = last + 1
    spread = sum((total - m * (n + 1) / 2.0) ** 2 for total in totals)
    most = m * m * (n**3 - n) - m * tied
    if most <= 0.0:
        return None
    w = 12.0 * spread / most
    return w, float(special.chdtrc(n - 1, m * (n - 1) * w))


def sentence(
    comparison: Comparison,
    name_a: str,
    name_b: str,
    unit: str,
    *,
    higher_is_better: bool = True,
    adjusted_p: float | None = None,
    digits: int = 2,
) -> str:
    """The comparison in plain words, for readers who do not know t tests.

    ``adjusted_p``, from `holm`, decides instead of p where it is given.

    >>> sentence(student([3.1, 3.2, 3.0], [2.1, 2.0, 2.2]), "DropConnect++", "Dropout", "points")
    'DropConnect++ beats Dropout by 1.00 points, 95% interval 0.77 to 1.23, p = 0.0003 (Student, n = 3 and 3)'
    """
    p = comparison.p if adjusted_p is None else adjusted_p
    low, high = comparison.interval
    difference = comparison.difference
    if p < SIGNIFICANCE:
        if (difference > 0.0) != higher_is_better:
            name_a, name_b = name_b, name_a
        if difference < 0.0:
            difference, low, high = -difference, -high, -low
        start = f"{name_a} beats {name_b} by {difference:.{digits}f} {unit}"
    else:
        # Recorded tables have these words: "not distinguishable from" would change them.
        start = f"{name_a} cannot be told from {name_b}: difference {_signed(difference, digits)} {unit}"
    chance = _p_value("p", comparison.p)
    if adjusted_p is not None:
        chance += f", {_p_value('Holm-adjusted p', adjusted_p)}"
    if comparison.test == "paired":
        sizes = f"n = {comparison.n_a} pairs"
        if comparison.unpaired:
            sizes += f", {comparison.unpaired} without a partner left out"
    else:
        sizes = f"n = {comparison.n_a} and {comparison.n_b}"
    interval = f"95% interval {_signed(low, digits)} to {_signed(high, digits)}"
    return f"{start}, {interval}, {chance} ({comparison.test}, {sizes})"


# ------------------------------------------------------------------------------ what the tests share


@dataclass(frozen=True)
class _Sample:
    """A checked sample by its moments, which neither overflow nor depend on the order of the values."""

    name: str
    n: int
    mean: float
    norm: float
    """Root of the sum of squared deviations from the mean."""

    @classmethod
    def of(
        cls, name: str, values: Iterable[float], least: int = 2, replicas: Sequence[object] | None = None
    ) -> _Sample:
        numbers = [float(value) for value in values]
        for place, number in enumerate(numbers):
            if not abs(number) < LARGEST:
                where = f"at position {place}" if replicas is None else f"for replica {replicas[place]!r}"
                raise SampleError(
                    f"{name} must hold finite numbers below {LARGEST:g} in size, got {number} {where}. "
                    "Leave runs that diverged out by name, and say how many there were."
                )
        if len(numbers) < least:
            raise SampleError(
                f"{name} needs at least {least} value{'s' * (least > 1)}, got {len(numbers)}. "
                "Run more replicas: a spread needs two, a useful one ten or more."
            )
        numbers.sort()
        # Relative to the smallest value, so that the mean of equal numbers is exactly that number.
        mean = numbers[0] + math.fsum(number - numbers[0] for number in numbers) / len(numbers)
        return cls(name, len(numbers), mean, math.hypot(*(number - mean for number in numbers)))

    @property
    def standard_deviation(self) -> float:
        return self.norm / math.sqrt(self.n - 1)

    @property
    def standard_error(self) -> float:
        return self.standard_deviation / math.sqrt(self.n)


def _compare(
    test: TestName,
    a: _Sample,
    b: _Sample,
    error: float,
    degrees: float,
    deviation: float,
    *,
    difference: float | None = None,
    unpaired: int = 0,
) -> Comparison:
    """The t test of a difference with a standard error, and the answer where there is no spread."""
    difference = a.mean - b.mean if difference is None else difference
    negligible = ROUNDING * max(abs(a.mean), abs(b.mean))
    if error <= negligible:
        if abs(difference) > negligible:
            raise SampleError(
                f"{test}: a and b differ by {difference:g} every time (means {a.mean:g} and {b.mean:g}), and without "
                "spread there is no t and no p. Add replicas, or state the difference as it is."
            )
        return Comparison(test, a.n, b.n, 0.0, (0.0, 0.0), 0.0, float(degrees), 1.0, 0.0, unpaired)
    t = difference / error
    half = _quantile(degrees) * error
    return Comparison(
        test=test,
        n_a=a.n,
        n_b=b.n,
        difference=difference,
        interval=(difference - half, difference + half),
        t=t,
        degrees_of_freedom=float(degrees),
        p=min(1.0, 2.0 * float(special.stdtr(degrees, -abs(t)))),
        effect_size=difference / deviation,
        unpaired=unpaired,
    )


def _quantile(degrees: float) -> float:
    """How many standard errors a two-sided 95% interval extends to either side."""
    return float(special.stdtrit(degrees, 1.0 - 0.5 * SIGNIFICANCE))


def _p_value(name: str, p: float) -> str:
    return f"{name} < 0.0001" if p < 0.0001 else f"{name} = {p:.4f}"


def _signed(number: float, digits: int) -> str:
    """A rounded number without the sign of a negative zero."""
    return f"{round(number, digits) + 0.0:.{digits}f}"

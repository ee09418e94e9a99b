"""Sentences that say how networks with few connections compare, generated from their numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dropconnectpp.lab.report.formats import fixed, kept, significant
from dropconnectpp.lab.report.sentences import Sentences, listed
from dropconnectpp.lab.report.statistics import SIGNIFICANCE
from dropconnectpp.lab.report.tables.rows import Table

BETTER, WORSE, EQUAL = "better than", "worse than", "not distinguishable from"
UNTESTED = "not tested against"


def times(value: float | None) -> str:
    """How many times fewer weights.

    >>> times(68.04), times(128.7), times(None)
    ('×68.0', '×129', '×–')
    """
    return f"×{significant(value)}"


def by_share(frontier: Table, tests: Table) -> Sentences:
    """For each data set, lines for each share: what DropConnect++ reaches, how the others compare, and the controls."""
    found: dict[str, tuple[str, ...]] = {}
    for row in frontier:
        if row["ours"] and row["error"]["mean"] is not None:
            against = [one for one in tests if (one["digest"], one["asked"]) == (row["digest"], row["asked"])]
            lines = [_line(row, [one for one in against if not one["control"]])]
            controls = [one for one in against if one["control"]]
            lines += [_controls(row, controls)] if controls else []
            found[row["title"]] = (*found.get(row["title"], ()), *lines)
    return tuple(found.items())


def _line(row: Mapping[str, Any], against: Sequence[Mapping[str, Any]]) -> str:
    error = row["error"]
    ends = "" if error["interval"] is None else f"; {fixed(error['interval'][0])} to {fixed(error['interval'][1])}"
    text = f"{row['method']} with {kept(row['share'])} of the weights, {times(row['times'])}: error "
    text += f"{fixed(error['mean'])}% (n = {error['n']}{ends})."
    if not row["reached"]:
        text += f" That is more than the {kept(row['asked'])} that was asked for."
    counted = [one for one in against if not unbeaten(one)]
    text += _compared(counted, "It is")
    return text + "".join(f" {own_figure(one)}" for one in against if unbeaten(one))


def _controls(row: Mapping[str, Any], controls: Sequence[Mapping[str, Any]]) -> str:
    each = listed([f"{one['other']} {fixed(one['other_mean'])}%" for one in controls])
    return f"Controls at {kept(row['asked'])}: {each}.{_compared(controls, row['method'] + ' is')}"


def _compared(against: Sequence[Mapping[str, Any]], start: str) -> str:
    """A sentence that says against whom it is better, worse or neither."""
    others: dict[str, list[str]] = {BETTER: [], EQUAL: [], WORSE: [], UNTESTED: []}
    for one in against:
        others[verdict_of(one)].append(one["other"])
    said = [f"{verdict} {listed(names)}" for verdict, names in others.items() if names]
    return f" {start} {'; '.join(said)}." if said else ""


def verdict_of(test: Mapping[str, Any]) -> str:
    """How DropConnect++ compares in error by Welch's test, adjusted."""
    welch = test["welch"]
    if welch is None:
        return UNTESTED
    if welch["adjusted_p"] >= SIGNIFICANCE:
        return EQUAL
    return BETTER if welch["difference"] < 0 else WORSE


def unbeaten(test: Mapping[str, Any]) -> bool:
    """Whether the other is worse here than where it was published: it is then not shown as beaten."""
    figure = test["own_figure"]
    return bool(figure) and not figure["reproduced"] and verdict_of(test) == BETTER


def own_figure(test: Mapping[str, Any]) -> str:
    """The published figure of an opponent that is worse here."""
    figure, other = test["own_figure"], test["other"]
    against = test["mean"] - figure["error"]
    how = "below" if against < 0 else "above"
    return (
        f"{other} has {fixed(test['other_mean'])}% at {times(1.0 / test['other_share'])} here and is not as good as "
        f"published, {fixed(figure['error'])}% at {times(figure['times'])}, so it does not count as beaten: "
        f"{test['method']} is {fixed(abs(against))} points {how} the published figure, at "
        f"{times(1.0 / test['share'])}."
    )

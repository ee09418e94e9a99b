"""Sentences that say what the tables show, generated from their numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from dropconnectpp.lab.report.formats import fixed, significant
from dropconnectpp.lab.report.selection import Selected
from dropconnectpp.lab.report.statistics import SIGNIFICANCE, Comparison, SampleError, paired, welch
from dropconnectpp.lab.report.tables.rows import OURS, Table, short

Sentences = tuple[tuple[str, tuple[str, ...]], ...]
"""For each data set a heading and lines."""
EQUAL = 0.05
"""Timings that differ by at most this share count as equal, whatever their spread."""


def summary(selected: Selected) -> str:
    """What the report holds, in one sentence.

    >>> summary(Selected((), ()))
    'There are no results yet.'
    """
    experiments = selected.experiments
    done, diverged = sum(len(e.done) for e in experiments), sum(len(e.diverged) for e in experiments)
    if not done + diverged:
        return selected.absence
    methods, sets = len({e.label for e in experiments}), list(dict.fromkeys(e.title for e in experiments))
    text = f"{_count(methods, 'method')} on {listed(sets)}: {_count(done, 'network')} trained to the end"
    return text + (f", {diverged} diverged." if diverged else ", none diverged.")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def findings(accuracy: Table, significance: Table) -> Sentences:
    """How DropConnect++ does on each data set: its mean, the paper's, and which methods it beats."""
    found: list[tuple[str, tuple[str, ...]]] = []
    for title, group in groupby(accuracy, lambda row: str(row["title"])):
        rows = list(group)
        ours = [row for row in rows if row["kind"] == OURS and row["mean"] is not None]
        if said := too_short(rows):
            found.append((title, (said,)))
            continue
        lines = tuple(_finding(row, [pair for pair in significance if pair["digest"] == row["digest"]]) for row in ours)
        if lines:
            found.append((title, lines))
    return tuple(found)


def too_short(rows: Sequence[Mapping[str, Any]]) -> str:
    """That such methods are not ranked, with what they were trained for; empty where they were trained for longer."""
    rows = [row for row in rows if row["n"]]
    if not short(row["epochs"] for row in rows):
        return ""
    epochs, counts = ({int(row[name]) for row in rows} for name in ("epochs", "n"))
    shown = [str(one.pop()) if len(one) == 1 else f"{min(one)} to {max(one)}" for one in (epochs, counts)]
    plural = "" if shown[0] == "1" else "s"
    return f"{shown[0]} epoch{plural}, n = {shown[1]} networks of each method: too small to rank methods."


def _finding(row: Mapping[str, Any], pairs: Sequence[Mapping[str, Any]]) -> str:
    beside = "" if row["paper"] is None else f"; the paper: {fixed(row['paper'])}%"
    # Recorded tables have these verdicts: "not distinguishable from" would change them.
    text = f"{row['method']} reaches {fixed(row['mean'])}% (n = {row['n']}{beside})."
    verdicts: dict[str, list[str]] = {"beats": [], "is beaten by": [], "cannot be told from": [], "": []}
    for pair in pairs:
        test = pair["welch"]
        if test is None:
            verdict = ""
        elif test["adjusted_p"] >= SIGNIFICANCE:
            verdict = "cannot be told from"
        else:
            verdict = "beats" if test["difference"] > 0 else "is beaten by"
        verdicts[verdict].append(pair["other"])
    untested = verdicts.pop("")
    said = [f"{verdict} {listed(others)}" for verdict, others in verdicts.items() if others]
    text += f" It {', and '.join(said)}." if said else ""
    return text + (f" It was not tested against {listed(untested)}." if untested else "")


def listed(names: Sequence[str]) -> str:
    """Names as a list in a sentence.

    >>> listed(["a", "b", "c"]), listed(["a"])
    ('a, b and c', 'a')
    """
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def cost(time: Table) -> Sentences:
    """Is DropConnect++ as cheap as Dropout? Answered from timings on the same device."""
    found = []
    for title, group in groupby(time, lambda row: str(row["title"])):
        rows = list(group)
        lines = tuple(_cost(row, rows) for row in rows if row["kind"] == OURS and _one_pass(row)[1] is not None)
        if lines:
            found.append((title, lines))
    return tuple(found)


def _one_pass(row: Mapping[str, Any]) -> tuple[str, float | None]:
    """The cheapest measured way to predict by Eq. (19), and its seconds."""
    if row["prediction_folded"] is not None:
        return "Folded into a plain network", row["prediction_folded"]
    return "By Eq. (19)", row["prediction_mean"]


def _cost(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    question = f"Is {row['method']} as cheap as Dropout?"
    others = [
        other
        for other in rows
        if other["kind"] == "dropout" and other["device"] == row["device"] and other["prediction_dropout"]
    ]
    way, seconds = _one_pass(row)
    rule = "folded" if row["prediction_folded"] is not None else "mean"
    if not others or seconds is None:
        return f"{question} Not measured: there are no timings of Dropout's predictions on the same device."
    other = others[0]
    base = float(other["prediction_dropout"])
    ratio = seconds / base
    spread = ratio_of_rounds(row, other, rule, "dropout")
    text = (
        f"{question} {way}, {_costlier(ratio, spread)}: 10,000 predictions take {significant(seconds)} s, "
        f"{fixed(ratio)} times Dropout's {significant(base)} s{_shown(spread, ' (', ')')}."
    )
    further = []
    if row["prediction_folded"] is not None and row["prediction_mean"] is not None:
        further.append(f"unfolded, Eq. (19) takes {fixed(row['prediction_mean'] / base)} times as long")
    if row["prediction_mc30"] is not None:
        further.append(f"Eq. (18) with 30 samples takes {fixed(row['prediction_mc30'] / base)} times as long")
    if further:
        joined = "; ".join(further)
        text += f" {joined[0].upper()}{joined[1:]}."
    return text + _training(row, other)


def _training(row: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    mine, base = row["seconds_per_epoch"], other["seconds_per_epoch"]
    if not mine or not base or row["replicas"] != other["replicas"]:
        return ""
    told = [_shown(ratio_of_rounds(row, other, "epoch", "epoch"))]
    if row["paper"] and other["paper"]:
        told.append(f"the paper: {fixed(row['paper'] / other['paper'])}")
    beside = "; ".join(filter(None, told))
    return f" Training takes {fixed(mine / base)} times as long{f' ({beside})' if beside else ''}."


def ratio_of_rounds(row: Mapping[str, Any], other: Mapping[str, Any], mine: str, its: str) -> Comparison | None:
    """The logarithm of a ratio of seconds, over the rounds: in pairs where both were timed in one session.

    None where rounds were not stored, or do not vary.
    """
    taken = [one.get("rounds", {}).get(name) for one, name in ((row, mine), (other, its))]
    if not all(taken):
        return None
    a, b = ([math.log(seconds) for seconds in several] for several in taken)
    try:
        if row["session"] and row["session"] == other["session"]:
            return paired(dict(enumerate(a)), dict(enumerate(b)))
        return welch(a, b)
    except SampleError:
        return None


def _costlier(ratio: float, spread: Comparison | None) -> str:
    """What a ratio of times allows to say: a difference needs a spread that excludes chance."""
    if abs(ratio - 1.0) <= EQUAL:
        return "yes"
    if spread is None:
        return "not tested, since no spread is stored"
    if spread.p >= SIGNIFICANCE:
        return "not distinguishable"
    return "yes, cheaper" if spread.difference < 0.0 else "no, more expensive"


def _shown(spread: Comparison | None, before: str = "", after: str = "") -> str:
    """The interval of a ratio."""
    if spread is None:
        return ""
    low, high = (fixed(math.exp(end)) for end in spread.interval)
    return f"{before}95% interval {low} to {high}, {min(spread.n_a, spread.n_b)} rounds{after}"


def monte_carlo(samples: Table) -> Sentences:
    """Does Monte Carlo with most samples beat one pass? For DropConnect++ only, as in the paper."""
    found: dict[str, tuple[str, ...]] = {}
    for row in samples:
        if row["kind"] == OURS and row["against_one_pass"]:
            heading = f"{row['title']}: {row['method']}"
            found[heading] = (row["against_one_pass"]["sentence"],)  # the last row has most samples
    return tuple(found.items())


def pairs(significance: Table, accuracy: Table) -> Sentences:
    """A sentence for each pair of methods, by Welch's test; none where networks were trained too short to be ranked."""
    found: dict[str, tuple[str, ...]] = {}
    for row in significance:
        said = too_short([one for one in accuracy if one["title"] == row["title"]])
        found[row["title"]] = (said,) if said else (*found.get(row["title"], ()), row["sentence"])
    return tuple(found.items())

"""What `dcpp demo` says in words, generated from the intervals: also where there is no gain, or a loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dropconnectpp.lab.report.formats import fixed, kept, signed, significant
from dropconnectpp.lab.report.sentences import Sentences, listed, too_short
from dropconnectpp.lab.report.statistics import SIGNIFICANCE
from dropconnectpp.lab.report.tables.demo import GRADUAL, PLAIN, PLAN, POSTERIOR
from dropconnectpp.lab.report.tables.rows import Table

Test = Mapping[str, Any] | None
AHEAD, BEHIND, EQUAL, UNTESTED = "ahead", "behind", "not distinguishable", "not tested"


def demo_lines(found: Mapping[str, Table]) -> tuple[str, ...]:
    """Five lines for a person; fewer where something was not measured, none without a demo."""
    if not found["demo"]:
        return ()
    lines = [_few(found["demo"]), _kept(found["demo"]), _doubt(found["demo_doubt"]), _small(found["demo_sizes"])]
    lines.append(_table_1(found["accuracy"]))
    return tuple(line for line in lines if line)


def demo_sentences(found: Mapping[str, Table]) -> Sentences:
    """The same lines under one heading, for the page."""
    lines = demo_lines(found)
    return ((str(found["demo"][0]["title"]), lines),) if lines else ()


def verdict(test: Test) -> str:
    """What a test allows to say.

    >>> verdict(None), verdict({"difference": -1.0, "adjusted_p": 0.01})
    ('not tested', 'behind')
    >>> verdict({"difference": 2.0, "adjusted_p": 0.3})
    'not distinguishable'
    """
    if test is None:
        return UNTESTED
    if test["adjusted_p"] >= SIGNIFICANCE:
        return EQUAL
    return AHEAD if test["difference"] > 0 else BEHIND


def _apart(test: Mapping[str, Any], digits: int = 1) -> str:
    """A difference with its interval."""
    low, high = test["interval"]
    shown = [signed(value, digits) for value in (test["difference"], low, high)]
    return f"{shown[0]}, 95% interval {shown[1]} to {shown[2]}"


def _against(test: Test, other: str, unit: str = " points", digits: int = 1) -> str:
    """Ahead of, behind or not distinguishable from something, with the numbers."""
    said = verdict(test)
    if test is None:
        return f"not tested against {other}"
    if said == EQUAL:
        return f"not distinguishable from {other} ({_apart(test, digits)})"
    joined = "ahead of" if said == AHEAD else "behind"
    return f"{fixed(abs(test['difference']), digits)}{unit} {joined} {other} ({_apart(test, digits)})"


def _row(table: Table, kind: str, asked: float | None = None) -> Mapping[str, Any] | None:
    rows = [row for row in table if row["kind"] == kind and row["mean"] is not None]
    rows = rows if asked is None else [row for row in rows if row["asked"] == asked]
    return min(rows, key=lambda row: float(row["asked"])) if rows else None


def _few(table: Table) -> str:
    """The smallest planned network beside the plain one, and every share beside gradual pruning."""
    ours, plain = _row(table, PLAN), _row(table, PLAIN)
    if ours is None:
        return ""
    text = f"Few connections: with {kept(ours['kept']['mean'])} of the weights, SparsityPlan classifies "
    text += f"{fixed(ours['mean'], 1)}% of {ours['test']:,.0f} test images correctly (n = {ours['n']})"
    if plain is not None:
        text += f", {_against(ours['against_plain'], 'the plain network')}, which reaches {fixed(plain['mean'], 1)}%"
    by_verdict: dict[str, list[str]] = {}
    for row in table:
        if row["kind"] == PLAN and row["mean"] is not None and _row(table, GRADUAL, row["asked"]) is not None:
            test = row["against_gradual"]
            said = f"at {kept(row['asked'])}" + ("" if test is None else f" ({_apart(test)})")
            by_verdict.setdefault(verdict(test), []).append(said)
    parts = [f"{said} {listed(shares)}" for said, shares in by_verdict.items()]
    return f"{text}." + (f" Beside gradual magnitude pruning it is {listed(parts)}." if parts else "")


def _kept(table: Table) -> str:
    """Which pixels are still read; a description, not a comparison."""
    ours = _row(table, PLAN)
    if ours is None or ours["read"]["mean"] is None or ours["pixels"] is None:
        return ""
    text = f"What was kept: {ours['read']['mean']:.0f} of {ours['pixels']:,} pixels still have a connection"
    other = _row(table, GRADUAL, ours["asked"])
    if other is not None and other["read"]["mean"] is not None:
        text += f"; after gradual magnitude pruning, {other['read']['mean']:.0f}"
    return f"{text}. The page shows which."


def _doubt(table: Table) -> str:
    """Whether doubt tells foreign images apart better than a plain network's does, and what it costs."""
    ours, plain = _row(table, POSTERIOR), _row(table, PLAIN)
    if ours is None or plain is None:
        return ""
    text = f"Foreign images: the entropy of DropConnect++ tells {ours['foreign']:,.0f} handwritten digits from clothes "
    text += (
        f"with an AUROC of {fixed(ours['mean'], 3)}, {_against(ours['against_plain'], 'the plain network', '', 3)}, "
    )
    text += f"which has {fixed(plain['mean'], 3)}. In accuracy it is "
    return text + f"{_against(ours['accuracy_against_plain'], 'it')}."


def _small(table: Table) -> str:
    """A smaller file and a faster pass, where the spread of the timings excludes chance."""
    if not table:
        return ""
    row = table[-1]
    before, after = row["bytes_before"]["mean"], row["bytes_after"]["mean"]
    text = f"Deployed: compact() and save() make a file of {after / 1000:,.0f} kB, where the plain network has "
    text += f"{before / 1000:,.0f} kB ({significant(before / after, 2)} times smaller)."
    speed = row["speed"]
    if speed is None:
        return f"{text} Speed was not tested: that needs two networks."
    times = f"{significant(speed['times'], 2)} times as fast, 95% interval {' to '.join(_ends(speed['interval']))}"
    ms = f"{significant(row['ms_after']['mean'], 2)} ms instead of {significant(row['ms_before']['mean'], 2)}"
    if speed["p"] >= SIGNIFICANCE:
        return f"{text} In time it is not distinguishable from the plain network ({times})."
    pace = "faster" if speed["times"] > 1.0 else "slower"
    return f"{text} It is {pace}: all test images take {ms} ({times})."


def _ends(interval: tuple[float, float]) -> tuple[str, str]:
    return significant(interval[0], 2), significant(interval[1], 2)


def _table_1(accuracy: Table) -> str:
    """That the paper's table in small ranks nothing; empty where its networks were trained for long."""
    said = too_short(accuracy)
    return f"The paper's Table 1 in small: {said}" if said else ""

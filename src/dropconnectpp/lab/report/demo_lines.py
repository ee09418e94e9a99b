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
MISSED = 0.1
"""A share kept that is further than this from the one asked for, as a share of it, is said."""
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


def _interval(test: Mapping[str, Any], digits: int, sign: float) -> str:
    """The interval of a difference, in the direction in which it is told."""
    ends = sorted(sign * end for end in test["interval"])
    return f"95% interval {' to '.join(fixed(end, digits) for end in ends)}"


def against(test: Test, other: str, unit: str = " points", digits: int = 2) -> str:
    """Ahead of, behind or not distinguishable from something, with the numbers.

    >>> against({"difference": -1.0, "interval": (-1.4, -0.6), "adjusted_p": 0.01}, "the plain network")
    '1.00 points behind the plain network (95% interval 0.60 to 1.40)'
    """
    if test is None:
        return f"not tested against {other}"
    said = verdict(test)
    if said == EQUAL:
        apart = f"{signed(test['difference'], digits)}{unit}, {_interval(test, digits, 1.0)}"
        return f"not distinguishable from {other} ({apart}, adjusted p = {test['adjusted_p']:.2g})"
    sign = 1.0 if said == AHEAD else -1.0
    joined = "ahead of" if said == AHEAD else "behind"
    return f"{fixed(abs(test['difference']), digits)}{unit} {joined} {other} ({_interval(test, digits, sign)})"


def _row(table: Table, kind: str, asked: float | None = None) -> Mapping[str, Any] | None:
    rows = [row for row in table if row["kind"] == kind and row["mean"] is not None]
    rows = rows if asked is None else [row for row in rows if row["asked"] == asked]
    return min(rows, key=lambda row: float(row["asked"])) if rows else None


def _few(table: Table) -> str:
    """The smallest planned network beside the plain one, and every share beside gradual pruning."""
    ours, plain = _row(table, PLAN), _row(table, PLAIN)
    if ours is None:
        return ""
    text = f"Few connections: with {_share(ours)} of the weights, SparsityPlan classifies {fixed(ours['mean'], 1)}% of "
    text += f"{_count(ours['test'])}test images correctly (n = {ours['n']})"
    if plain is not None:
        text += f", {against(ours['against_plain'], 'the plain network')}, which reaches {fixed(plain['mean'], 1)}%"
    by_verdict: dict[str, list[str]] = {}
    for row in table:
        if row["kind"] == PLAN and row["mean"] is not None and _row(table, GRADUAL, row["asked"]) is not None:
            test = row["against_gradual"]
            apart = "" if test is None else f" ({signed(test['difference'])}, {_interval(test, 2, 1.0)})"
            by_verdict.setdefault(verdict(test), []).append(f"at {_share(row)}{apart}")
    parts = [f"{said} {listed(shares)}" for said, shares in by_verdict.items()]
    return f"{text}." + (f" Beside gradual magnitude pruning it is {listed(parts)}." if parts else "")


def _share(row: Mapping[str, Any]) -> str:
    """The share of weights kept, and that asked for where it is another: methods are compared by the latter."""
    share, asked = row["kept"]["mean"], row["asked"]
    missed = share is not None and abs(share - asked) > MISSED * asked
    return f"{kept(share)} ({kept(asked)} were asked for)" if missed else kept(asked)


def _count(number: float | None) -> str:
    return "" if number is None else f"{number:,.0f} "


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
    text = (
        f"Foreign images: the entropy of DropConnect++ tells {_count(ours['foreign'])}handwritten digits from clothes "
    )
    text += f"with an AUROC of {fixed(ours['mean'], 3)}, {against(ours['against_plain'], 'the plain network', '', 3)}, "
    text += f"which has {fixed(plain['mean'], 3)}. Its accuracy, {fixed(ours['accuracy']['mean'], 1)}%, is "
    return text + f"{against(ours['accuracy_against_plain'], 'the other')}."


def _small(table: Table) -> str:
    """A smaller file and a faster pass, where the spread of the timings excludes chance."""
    row = table[-1] if table else None
    if row is None or min(row["bytes_before"]["mean"], row["bytes_after"]["mean"]) <= 0.0:
        return ""
    before, after = row["bytes_before"]["mean"], row["bytes_after"]["mean"]
    text = f"Deployed: compact() and save() make a file of {after / 1000:,.0f} kB, where the plain network has "
    text += f"{before / 1000:,.0f} kB ({significant(before / after, 2)} times smaller)."
    speed = row["speed"]
    if speed is None:
        return f"{text} Speed was not tested: that needs two networks."
    times = f"{significant(speed['times'])} times as fast, 95% interval {' to '.join(_ends(speed['interval']))}"
    ms = f"{significant(row['ms_after']['mean'])} ms instead of {significant(row['ms_before']['mean'])}"
    if speed["p"] >= SIGNIFICANCE:
        return f"{text} In time it is not distinguishable from the plain network ({times})."
    pace = "faster" if speed["times"] > 1.0 else "slower"
    return f"{text} It is {pace}: all test images take {ms} ({times})."


def _ends(interval: tuple[float, float]) -> tuple[str, str]:
    return significant(interval[0]), significant(interval[1])


def _table_1(accuracy: Table) -> str:
    """That the paper's table in small ranks nothing; empty where its networks were trained for long."""
    said = too_short(accuracy)
    return f"The paper's Table 1 in small: {said}" if said else ""

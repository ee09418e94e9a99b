"""More than six methods in a terminal: the best five, what differs between them, and how many pairs do not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from report_cases import chosen, fill

from dropconnectpp.lab.config.method import Method
from dropconnectpp.lab.report import report_tables, text
from dropconnectpp.lab.report.shortlist import shortened
from dropconnectpp.lab.runs.store import Store

SPREAD = (-0.2, 0.1, 0.3, -0.1, -0.1)
MEANS = {2.0: 70.0, 3.0: 74.0, 4.0: 75.0, 5.0: 75.02, 6.0: 73.0, 7.0: 71.0}


def ours(beta: float) -> Method:
    return Method(kind="dropconnect++", hyper="optimal", estimator="local", beta=beta)


def fill_many(path: Path, betas: tuple[float, ...]) -> Path:
    """A plain network, and DropConnect++ with one prior after the other."""
    with Store.open(path) as store:
        base = chosen("cifar10", "none")
        fill(store, base, {r: {"accuracy": 72.0 + one} for r, one in enumerate(SPREAD)})
        for beta in betas:
            results = {r: {"accuracy": MEANS[beta] + SPREAD[(r + int(beta)) % 5]} for r in range(5)}
            fill(store, replace(base, method=ours(beta)), results)
    return path


@pytest.fixture
def many(tmp_path) -> Path:
    return fill_many(tmp_path / "results.sqlite", tuple(MEANS))


def test_the_best_five_are_listed_from_the_best_with_what_tells_them_apart(many):
    shown = text(many, ["accuracy"], brief=True)
    table = shown[: shown.index("CIFAR-10: the best")]
    rows = [line.split("  ")[0] for line in table.splitlines() if line.startswith(("No reg", "DropConnect++"))]
    assert rows == [
        "DropConnect++ (beta=5.0)",
        "DropConnect++ (beta=4.0)",
        "DropConnect++ (beta=3.0)",
        "DropConnect++ (beta=6.0)",
        "No regularization",
    ]
    said = " ".join(shown.split())
    assert "CIFAR-10: the best 5 of 7 methods by mean accuracy." in said
    assert "They share, of DropConnect++: estimator=local, hyper=optimal." in said
    assert "1 of 10 tested pairs among them are not distinguishable and left out." in said
    assert said.endswith("The page has every method and pair.")


def test_only_pairs_that_differ_are_told_under_the_short_names(many):
    shown = " ".join(text(many, ["significance"], brief=True).split())
    assert "DropConnect++ (beta=5.0) beats DropConnect++ (beta=3.0) by 1.02 points" in shown
    assert "DropConnect++ (beta=4.0) and" not in shown, "a pair that does not differ"
    assert "beta=2.0" not in shown
    assert "hyper=optimal, beta" not in shown


def test_p_stays_adjusted_over_all_pairs(many):
    with Store.open(many, read_only=True) as store:
        found = report_tables(store.rows(), store.notes())
    tables, _ = shortened(found)
    all_pairs = {(row["digest"], row["other_digest"]): row["welch"]["adjusted_p"] for row in found["significance"]}
    assert len(tables["significance"]) == 9
    for row in tables["significance"]:
        assert row["welch"]["adjusted_p"] == all_pairs[row["digest"], row["other_digest"]]


def test_six_methods_are_all_shown(tmp_path):
    path = fill_many(tmp_path / "results.sqlite", tuple(MEANS)[:5])
    assert text(path, brief=True) == text(path)
    with Store.open(path, read_only=True) as store:
        found = report_tables(store.rows(), store.notes())
    assert shortened(found) == (found, ())


def test_without_brief_all_is_shown(many):
    shown = text(many, ["accuracy"])
    assert shown.count("hyper=optimal") == 6
    assert "the best 5" not in shown

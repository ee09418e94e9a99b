"""Small data in the report: a line for each method and size, tests by size, a figure, and no trace in other tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from judged_cases import entries
from report_cases import EVIDENCE, chosen, fill
from scipy import stats

from dropconnectpp.lab import report
from dropconnectpp.lab.config.ensembles import Ensemble
from dropconnectpp.lab.config.protocol import Protocol
from dropconnectpp.lab.config.small_data import SmallData
from dropconnectpp.lab.config.uncertainty import JUDGED
from dropconnectpp.lab.report.selection import select_experiments
from dropconnectpp.lab.report.tables.paper import report_tables
from dropconnectpp.lab.report.views.small_data import lay_out_small_data
from dropconnectpp.lab.runs.owner import Owner
from dropconnectpp.lab.runs.store import Store

SIZES = (250, 5000, 0)
NLL = {"none": 1.3, "dropout": 0.75, "dropconnect++": 0.66}
COUNT = 6


def protocols(kind: str) -> tuple[Protocol, ...]:
    base = replace(chosen("fashion-mnist", kind), evaluation=replace(JUDGED, foreign="mnist"))
    return SmallData(examples=SIZES).protocols(base)


def values(kind: str, examples: int) -> list[float]:
    """NLLs of drawn networks, or of plain ones: lower with more examples."""
    noise = np.random.default_rng(examples).normal(0.0, 0.01, COUNT)
    own = np.random.default_rng(len(kind)).normal(0.0, 0.002, COUNT)
    worse = {250: 1.0, 5000: 0.4, 0: 0.0}[examples]
    return (NLL[kind] + worse + noise + own).tolist()


@pytest.fixture
def filled(store: Store) -> None:
    for kind in NLL:
        for one in protocols(kind):
            nlls = values(kind, one.training.examples)
            ways = ("one pass",) if kind == "none" else ("one pass", "networks")
            judged = {r: [e for way in ways for e in entries(way, nlls[r], 0.9)[:2]] for r in range(COUNT)}
            results = {r: {"accuracy": 80.0, "nll": nlls[r], "judged": judged[r]} for r in range(COUNT)}
            fill(store, one, results)
            if kind == "none":
                put_ensembles(store, one, [0.6, 0.61])


def put_ensembles(store: Store, of: Protocol, nlls: list[float]) -> None:
    me = Owner.here()
    digest = store.add(Ensemble(of=of))
    for key in store.claim([(digest, number) for number in range(len(nlls))], me):
        found: dict[str, Any] = {"judged": entries("ensemble", nlls[key.replica], 0.95)[:2]}
        store.finish(key, me, "done", results=found, **EVIDENCE)


def tables(store: Store) -> dict[str, Any]:
    return report_tables(store.rows(), store.notes())


def test_each_method_has_a_line_at_each_size_all_of_them_last(store: Store, filled) -> None:
    rows = tables(store)["small_data"]
    assert [row["examples"] for row in rows] == [250] * 4 + [5000] * 4 + [None] * 4
    assert [(row["method"], row["prediction"]) for row in rows[:4]] == [
        ("No regularization", "one pass"),
        ("Dropout", "networks"),
        ("DropConnect++", "networks"),
        ("Ensemble of 5", "ensemble"),
    ]
    assert rows[2]["nll"]["mean"] == pytest.approx(np.mean(values("dropconnect++", 250)))
    assert {row["title"] for row in rows} == {"Fashion-MNIST"}
    view = lay_out_small_data(tables(store))[0]
    assert [group.title for group in view.groups] == [
        f"Fashion-MNIST, {size} training examples" for size in ("250", "5,000", "all")
    ]


def test_pairs_are_tested_at_each_size_and_told_by_size(store: Store, filled) -> None:
    rows = tables(store)["small_data_tests"]
    assert [(row["examples"], row["other"]) for row in rows] == [
        (size, other) for size in (250, 5000, None) for other in ("No regularization", "Dropout", "Ensemble of 5")
    ]
    expected = stats.ttest_rel(values("dropconnect++", 5000), values("dropout", 5000)).pvalue
    assert rows[4]["nll"]["p"] == pytest.approx(expected)
    view = lay_out_small_data(tables(store))[1]
    ((title, lines),) = view.sentences
    assert title == "Fashion-MNIST"
    assert "DropConnect++ against Dropout, NLL: better with 250 / 5,000 / all." in lines
    assert "DropConnect++ against Ensemble of 5, NLL: worse with 250 / 5,000 / all." in lines


def test_other_tables_have_the_networks_with_all_examples_alone(store: Store, filled) -> None:
    found = tables(store)
    for name in ("accuracy", "calibration", "probabilities", "significance"):
        assert {row["title"] for row in found[name]} == {"Fashion-MNIST"}
    assert len(found["accuracy"]) == 3
    assert len(found["probabilities"]) == 6  # two ways of two methods, one of the plain one, its ensembles
    selected = select_experiments(store.rows(), store.notes())
    titles = {one.title for one in selected.experiments}
    assert titles == {"Fashion-MNIST", "Fashion-MNIST (250 examples)", "Fashion-MNIST (5,000 examples)"}


def test_without_few_examples_there_is_no_such_table(store: Store) -> None:
    for kind in NLL:
        fill(store, protocols(kind)[-1], {r: {"accuracy": 80.0, "nll": 1.0} for r in range(2)})
    assert tables(store)["small_data"] == tables(store)["small_data_tests"] == []


def test_the_page_has_a_figure(store: Store, filled, path: Path, tmp_path: Path) -> None:
    page = report.build(path, tmp_path / "report", figures=False)
    text = page.read_text()
    assert '<section id="small_data">' in text
    assert "small-data-fashion-mnist-nll" in text
    assert "Accuracy and NLL by the number of training examples" in text

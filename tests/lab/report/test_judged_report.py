"""Probabilities, foreign and corrupted images in the report: means, tests of pairs and of ensembles, verdicts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from judged_cases import CORRUPTIONS, entries
from report_cases import EVIDENCE, chosen, fill
from scipy import stats

from dropconnectpp.lab import report
from dropconnectpp.lab.config.ensembles import Ensemble
from dropconnectpp.lab.config.method import METHODS
from dropconnectpp.lab.config.protocol import Protocol
from dropconnectpp.lab.config.uncertainty import JUDGED
from dropconnectpp.lab.report.figures import drawings
from dropconnectpp.lab.report.selection import select_experiments
from dropconnectpp.lab.report.tables.judged import TESTED
from dropconnectpp.lab.report.tables.paper import report_tables
from dropconnectpp.lab.report.views.cells import TableView
from dropconnectpp.lab.report.views.judged import lay_out_judged
from dropconnectpp.lab.runs.owner import Owner
from dropconnectpp.lab.runs.store import Store

EVALUATION = replace(JUDGED, foreign="svhn", corruptions=CORRUPTIONS)


def protocol(kind: str, **changes: Any) -> Protocol:
    found = chosen("cifar10", kind, **changes) if kind in METHODS else chosen("cifar10", "dropconnect++", **changes)
    return replace(found, evaluation=EVALUATION)


def put(store: Store, kind: str, nll: float, count: int = 6, *, shift: float = 0.05, **changes: Any) -> dict[str, list]:
    """A method whose drawn networks are better than one pass by ``shift`` nats; the NLLs by way."""
    noise = np.random.default_rng(0).normal(0.0, 0.01, count)
    own = np.random.default_rng(sum(map(ord, kind))).normal(0.0, 0.002, count)
    values = {"one pass": (nll + noise + own).tolist()}
    if kind != "none":
        values["networks"] = (nll - shift + noise + own).tolist()
    results = {
        r: {"accuracy": 80.0, "nll": values["one pass"][r]}
        | {"judged": [e for way, found in values.items() for e in entries(way, found[r], 0.9 - found[r] / 10)]}
        for r in range(count)
    }
    fill(store, protocol(kind, **changes), results)
    return values


def put_ensembles(store: Store, kind: str, nlls: list[float]) -> None:
    own, me = Ensemble(of=protocol(kind)), Owner.here()
    digest = store.add(own)
    for key in store.claim([(digest, number) for number in range(len(nlls))], me):
        results = {"judged": entries("ensemble", nlls[key.replica], 0.95), "accuracy": 81.0, "nll": nlls[key.replica]}
        store.finish(key, me, "done", results=results, **EVIDENCE)


def tables(store: Store) -> dict[str, Any]:
    return report_tables(store.rows(), store.notes())


def view(store: Store, name: str) -> TableView:
    return next(one for one in lay_out_judged(tables(store)) if one.name == name)


@pytest.fixture
def filled(store: Store) -> dict[str, dict[str, list]]:
    values = {kind: put(store, kind, nll) for kind, nll in (("none", 1.3), ("dropout", 0.75), ("dropconnect++", 0.66))}
    values["ensemble"] = {"ensemble": [0.70, 0.71, 0.69, 0.72]}
    put_ensembles(store, "none", values["ensemble"]["ensemble"])
    return values


def test_each_method_has_a_line_for_each_way_to_predict(store: Store, filled) -> None:
    rows = tables(store)["probabilities"]
    assert [(row["method"], row["prediction"], row["count"], row["nll"]["n"]) for row in rows] == [
        ("No regularization", "one pass", 1, 6),
        ("Dropout", "one pass", 1, 6),
        ("Dropout", "networks", 30, 6),
        ("DropConnect++", "one pass", 1, 6),
        ("DropConnect++", "networks", 30, 6),
        ("Ensemble of 5", "ensemble", 5, 4),
    ]
    drawn = filled["dropconnect++"]["networks"]
    assert rows[4]["nll"]["mean"] == pytest.approx(np.mean(drawn))
    half = stats.t.ppf(0.975, 5) * stats.sem(drawn)
    assert rows[4]["nll"]["interval"] == pytest.approx((np.mean(drawn) - half, np.mean(drawn) + half))
    shown = [tuple(cell.text for cell in row[:2]) for row in view(store, "probabilities").groups[0].rows]
    assert shown[2] == ("Dropout", "30 networks")
    assert shown[-1] == ("Ensemble of 5", "5 members")


def test_foreign_images_are_named(store: Store, filled) -> None:
    rows = tables(store)["detection"]
    assert {row["images"] for row in rows} == {"SVHN"}
    assert rows[-1]["auroc"]["mean"] == 0.95


def test_corruptions_are_averaged_first_over_kinds_of_each_network(store: Store, filled) -> None:
    found = tables(store)["corruptions"]
    rows = [row for row in found if row["measure"] == "accuracy" and row["method"] == "Ensemble of 5"]
    assert {row["severity"]: row["mean"] for row in rows} == pytest.approx(
        {0: 80.0, **{s: 80.0 - s - 0.5 for s in range(1, 6)}, None: 76.5}
    )
    (group,) = [g for g in view(store, "corruptions").groups if g.title == "CIFAR-10: Accuracy, %"]
    assert [cell.text for cell in group.rows[-1]][:8] == [
        *("Ensemble of 5", "5 members", "80.00", "78.50", "77.50", "76.50", "75.50", "74.50")
    ]
    kinds = tables(store)["corruption_kinds"]
    assert [row["accuracy"]["mean"] for row in kinds if row["method"] == "Ensemble of 5"] == [77.0, 76.0]


def test_ours_is_compared_in_pairs_and_with_ensembles_by_welch(store: Store, filled) -> None:
    rows = tables(store)["probability_tests"]
    assert [(row["method"], row["other"], row["other_prediction"]) for row in rows] == [
        ("DropConnect++", "No regularization", "one pass"),
        ("DropConnect++", "Dropout", "networks"),
        ("DropConnect++", "Ensemble of 5", "ensemble"),
    ]
    ours = filled["dropconnect++"]["networks"]
    paired = stats.ttest_rel(ours, filled["dropout"]["networks"]).pvalue
    welch = stats.ttest_ind(ours, filled["ensemble"]["ensemble"], equal_var=False).pvalue
    assert rows[1]["nll"]["p"] == pytest.approx(paired)
    assert rows[2]["nll"]["p"] == pytest.approx(welch)
    assert (rows[2]["nll"]["n"], rows[2]["nll"]["other_n"]) == (6, 4)
    for name in TESTED:
        assert all(row[name] is None or row[name]["adjusted_p"] >= row[name]["p"] for row in rows)
    assert rows[1]["accuracy"] is None or rows[1]["accuracy"]["p"] == 1.0  # equal, every time


def test_verdicts_know_which_direction_is_better(store: Store, filled) -> None:
    ((name, lines),) = view(store, "probability_tests").sentences
    assert name == "CIFAR-10"
    assert lines[1].startswith(
        "DropConnect++, 30 networks, against Dropout, 30 networks: better in NLL, ECE, AUROC, NLL on"
    )
    assert "worse in AUROC" in lines[2]  # the ensembles tell SVHN best
    assert lines[2].endswith("(n = 6 and 4).")


def test_short_trainings_have_no_verdict(store: Store) -> None:
    for kind in ("none", "dropconnect++"):
        put(store, kind, 1.0, epochs=2)
    assert view(store, "probability_tests").sentences == (("CIFAR-10", ()),)


def test_ensembles_of_other_methods_are_named_and_not_tested(store: Store, filled) -> None:
    put_ensembles(store, "dropout", [0.6, 0.61])
    found = tables(store)
    assert [row["method"] for row in found["probabilities"]][-1] == "Ensemble of 5, Dropout"
    assert len(found["probability_tests"]) == 3


def test_ensembles_whose_members_are_not_in_the_store_are_shown(store: Store) -> None:
    put_ensembles(store, "none", [0.6, 0.61])
    (row,) = tables(store)["probabilities"]
    assert (row["method"], row["data"], row["nll"]["n"]) == ("Ensemble of 5", "cifar10", 2)


def test_damage_and_strange_numbers_do_not_break_the_tables(store: Store) -> None:
    broken = [
        *({"prediction": "one pass", "images": "test", "severity": 0, "nll": value} for value in (None, "x", True)),
        {"prediction": 7, "images": ["a"], "severity": "b"},
        {},
    ]
    fill(store, protocol("dropout"), {0: {"accuracy": 1.0, "nll": 1.0, "judged": broken}})
    assert [row["nll"]["n"] for row in tables(store)["probabilities"]] == [0]


def test_the_report_has_them(store: Store, filled, path: Path, tmp_path: Path) -> None:
    page = report.build(path, tmp_path / "report", figures=False)
    text = page.read_text()
    assert '<section id="probabilities">' in text
    for name in ("probabilities", "detection", "corruptions", "corruption_kinds", "probability_tests"):
        assert (page.parent / "tables" / f"{name}.csv").exists()
    assert "Ensemble of 5 on CIFAR-10" in text or "Ensemble of 5 on cifar10" in text


def test_a_figure_has_a_line_for_each_method_by_severity(store: Store, filled) -> None:
    put_ensembles(store, "dropout", [0.6, 0.61])
    ((drawn,), *_) = [found for kind, found in drawings_of(store).items() if kind == "corruptions"]
    assert [entry.label for entry in drawn.legend] == [
        "No regularization",
        "Dropout",
        "DropConnect++",
        "Ensemble of 5",
    ]
    assert [panel.heading for panel in drawn.panels] == ["Accuracy", "NLL", "ECE"]
    assert "Without corruption: No regularization 80.00; " in drawn.panels[0].description
    assert drawn.panels[0].svg.startswith("<svg")


def drawings_of(store: Store) -> dict[Any, Any]:
    selected = select_experiments(store.rows(), store.notes())
    return drawings(selected, tables(store))

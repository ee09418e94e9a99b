"""The UCI benchmark in the report: means, tests that count what splits share, verdicts in words."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from uci_cases import SHORT

from dropconnectpp.errors import ArgumentError
from dropconnectpp.lab import report
from dropconnectpp.lab.config.protocol import paper
from dropconnectpp.lab.config.uci import KINDS, LABELS, SETS, Kind, Regression
from dropconnectpp.lab.report.published_uci import UCI
from dropconnectpp.lab.report.selection import select_experiments
from dropconnectpp.lab.report.statistics import paired, resampled
from dropconnectpp.lab.report.tables.paper import report_tables
from dropconnectpp.lab.report.views.cells import TableView
from dropconnectpp.lab.report.views.uci import lay_out_uci, verdicts
from dropconnectpp.lab.runs.owner import Owner
from dropconnectpp.lab.runs.store import Row, Store


def put(store: Store, kind: Kind, values: dict[int, tuple[float, float]], data: str = "uci:yacht", **more: Any) -> None:
    """Made-up rows: log likelihood and RMSE by split."""
    me = Owner.here()
    digest = store.add(Regression(data=data, kind=kind, training=SHORT))
    for key in store.claim([(digest, split) for split in values], me):
        likelihood, rmse = values[key.replica]
        results = {"log_likelihood": likelihood, "rmse": rmse, "coverage": 0.9, "factor": 1.2, "train": 90, "test": 10}
        results["rate"] = 0.0 if kind in ("plain", "ensemble") else 0.001 if key.replica < 4 else 0.1
        status = "done" if math.isfinite(likelihood) else "diverged"
        store.finish(key, me, status, results=results | more, seconds=1.0, device="cpu")


def spread(mean: float, count: int = 20, seed: int = 0, width: float = 0.05) -> dict[int, tuple[float, float]]:
    noise = np.random.default_rng(seed).normal(0.0, width, (count, 2))
    return {split: (mean + a, 2.0 - mean + b) for split, (a, b) in enumerate(noise.tolist())}


def tables(store: Store) -> dict[str, Any]:
    return report_tables(store.rows(), store.notes())


def view(store: Store, name: str) -> TableView:
    return next(one for one in lay_out_uci(tables(store)) if one.name == name)


def test_means_and_standard_errors(store: Store) -> None:
    values = spread(-1.0)
    put(store, "dropconnect++", values, keep_probability=0.75)
    row = tables(store)["uci"][0]
    likelihoods = [pair[0] for pair in values.values()]
    assert row["log_likelihood"]["mean"] == pytest.approx(np.mean(likelihoods))
    assert row["log_likelihood"]["standard_error"] == pytest.approx(stats.sem(likelihoods))
    assert (row["n"], row["splits"], row["complete"], row["settings"]) == (20, 20, True, 8)
    shown = view(store, "uci").groups[0]
    assert shown.title == "yacht, 90 examples to train on, 10 to test on"
    texts = [cell.text for cell in shown.rows[0]]
    assert texts[0] == "DropConnect++"
    assert texts[1] == f"{np.mean(likelihoods):.3f} ± {stats.sem(likelihoods):.3f}".replace("-", texts[1][0])
    assert texts[3:] == ["90%", "0.001: 4, 0.1: 16", "1.20", "0.75", "20 of 20", "8"]


def test_the_order_is_that_of_sets_and_methods(store: Store) -> None:
    for data in ("uci:energy", "uci:yacht"):
        for kind in reversed(KINDS):
            put(store, kind, spread(-1.0, 2), data)
    found = [(row["title"], row["method"]) for row in tables(store)["uci"]]
    assert found == [(name, LABELS[kind]) for name in ("yacht", "energy") for kind in KINDS]


def test_a_partial_or_diverged_set_says_so_and_has_no_best(store: Store) -> None:
    put(store, "dropconnect++", spread(-1.0, 4) | {4: (math.nan, 1.0)})
    row = tables(store)["uci"][0]
    assert (row["n"], row["complete"], row["diverged"]) == (4, False, [4])
    details, means = view(store, "uci"), view(store, "uci_log_likelihood")
    assert not any(cell.strong for cell in (*details.groups[0].rows[0], *means.groups[0].rows[0]))
    assert any("DropConnect++ on yacht: splits [4]" in note for note in details.notes)
    assert means.groups[0].rows[0][1].text.endswith("(4 of 20)")


def test_the_corrected_test_is_wider_than_the_paired_one() -> None:
    a, b = ({split: pair[0] for split, pair in spread(mean, seed=seed).items()} for mean, seed in ((0.0, 1), (0.1, 2)))
    plain, found = paired(a, b), resampled(a, b, 1 / 9)
    differences = np.array([a[split] - b[split] for split in a])
    error = math.sqrt((1 / 20 + 1 / 9) * differences.var(ddof=1))
    assert found.t == pytest.approx(differences.mean() / error)
    assert found.p == pytest.approx(2 * stats.t.sf(abs(found.t), 19))
    half = stats.t.ppf(0.975, 19) * error
    assert found.interval == pytest.approx((differences.mean() - half, differences.mean() + half))
    assert found.p > plain.p
    assert resampled(a, b, 0.0).p == pytest.approx(plain.p)
    with pytest.raises(ArgumentError, match="test_share"):
        resampled(a, b, -1.0)


def test_verdicts_say_which_way_it_went(store: Store) -> None:
    for data, mean in (("uci:yacht", -1.0), ("uci:energy", 1.0), ("uci:concrete", 0.0)):
        put(store, "dropconnect++", spread(mean), data)
        put(store, "mc-dropout", spread(0.0, seed=1), data)
    found = tables(store)
    assert len(found["uci_tests"]) == 3
    ahead = sum(row["log_likelihood"]["difference"] > 0 for row in found["uci_tests"])
    places = "better on energy; worse on yacht; not distinguishable on concrete"
    said = f"DropConnect++ against MC dropout: {places}. Its mean is better on {ahead} of 3 sets."
    assert verdicts(found["uci_tests"], "log_likelihood") == (said,)
    assert verdicts(found["uci_tests"], "rmse")[0].startswith(f"DropConnect++ against MC dropout: {places}.")
    assert view(store, "uci_log_likelihood").sentences == (("Log likelihood", (said,)),)
    for row in found["uci_tests"]:
        assert row["log_likelihood"]["adjusted_p"] >= row["log_likelihood"]["p"]


def test_methods_of_other_settings_are_not_compared(store: Store) -> None:
    put(store, "dropconnect++", spread(0.0))
    other = Regression(data="uci:yacht", kind="plain", training=SHORT, root_seed=1)
    me = Owner.here()
    key = store.claim([(store.add(other), 0)], me)[0]
    store.finish(key, me, "done", results={"log_likelihood": 0.0, "rmse": 1.0}, seconds=1.0, device="cpu")
    assert tables(store)["uci_tests"] == []


def test_published_values_stand_beside_the_sets_that_were_run(store: Store) -> None:
    assert len(UCI) == 3 * len(SETS)
    assert {one.data for one in UCI} == set(SETS.values())
    put(store, "plain", spread(0.0, 2), "uci:energy")
    rows = tables(store)["uci_published"]
    assert {row["title"] for row in rows} == {"energy"}
    assert [(row["method"], row["rmse"], row["log_likelihood"]) for row in rows][1] == (
        "MC dropout, tuned again",
        0.54,
        -1.21,
    )


def test_a_line_for_each_set_has_methods_and_published_values_side_by_side(store: Store) -> None:
    for kind, mean in zip(KINDS, (-1.0, -0.5, -0.8, -0.9, -0.7), strict=True):
        put(store, kind, spread(mean, width=0.01), "uci:energy")
    put(store, "plain", spread(-2.0), "uci:yacht")
    assert [row[4].text for row in view(store, "uci").groups[1].rows][0::4] == ["–", "–"]
    means, errors = view(store, "uci_log_likelihood"), view(store, "uci_rmse")
    assert means.columns[1:6] == tuple(LABELS.values())
    assert means.columns[6:] == ("PBP, published", "MC dropout, tuned again, published", "Deep Ensembles, published")
    assert [row[0].text for row in means.groups[0].rows] == ["yacht", "energy"]
    energy = means.groups[0].rows[1]
    assert [cell.strong for cell in energy] == [False, False, True, *[False] * 6]
    assert [cell.value for cell in energy[6:]] == [-2.04, -1.21, -1.38]
    assert [cell.strong for cell in errors.groups[0].rows[1]][1:6] == [False, True, False, False, False]
    assert [cell.text for cell in means.groups[0].rows[0][2:6]] == ["–"] * 4


def test_the_page_shows_it_with_its_evidence_and_images_are_not_missed(store: Store, path: Path) -> None:
    put(store, "dropconnect++", spread(0.0))
    put(store, "mc-dropout", spread(-0.3, seed=1))
    page = report.build(path, path.parent / "report").read_text()
    assert '<section id="uci">' in page
    assert "Deep Ensembles, published" in page
    assert store.rows()[0].key.digest in page
    assert (path.parent / "report" / "tables" / "uci_tests.csv").is_file()
    assert "MC dropout" in report.text(path, ["uci"])


def test_images_and_benchmarks_do_not_mix(store: Store) -> None:
    put(store, "plain", spread(0.0, 2))
    protocol = paper("cifar10", "none")
    me = Owner.here()
    key = store.claim([(store.add(protocol), 0)], me)[0]
    store.finish(key, me, "done", results={"accuracy": 70.0, "nll": 1.0}, seconds=1.0, device="cpu")
    rows: list[Row] = store.rows()
    selected = select_experiments(rows, store.notes())
    assert [one.digest for one in selected.experiments] == [protocol.digest]
    assert len(selected.benchmarks) == 2
    assert [row["data"] for row in tables(store)["accuracy"]] == ["cifar10"]

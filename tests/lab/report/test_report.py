"""The report: hand-made stores whose cells are known, the same bytes twice, hostile names, and stores with gaps."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from report_cases import (
    ACCURACY,
    Checker,
    chosen,
    contents,
    fill,
    fill_set,
    fill_with_evil,
    line_of,
    result,
    tables,
)

from dropconnectpp.errors import ArgumentError
from dropconnectpp.lab import report
from dropconnectpp.lab.config.protocol import paper
from dropconnectpp.lab.report import build, paper_values, text_tables
from dropconnectpp.lab.report.provenance import evidence
from dropconnectpp.lab.report.render import drawing
from dropconnectpp.lab.report.selection import select_experiments
from dropconnectpp.lab.report.statistics import SIGNIFICANCE, holm, paired, student, summarise, welch
from dropconnectpp.lab.runs.database import StoreError
from dropconnectpp.lab.runs.owner import Owner
from dropconnectpp.lab.runs.store import Store


def text(store: Store) -> str:
    found = text_tables(store.rows(), store.notes(), store.protocols())
    assert report.text(store.path) == found
    return found


def page(store: Store, command: str = "", drawn: bool = False) -> str:
    """The page of a store, after the checks that every page must pass; its figures, which take time, if asked for."""
    folder = store.path.parent / "site"
    with nullcontext() if drawn else patch.object(drawing, "inline", lambda _: "<svg></svg>"):
        found = build(store.path, folder, command=command, figures=False).read_text(encoding="utf-8")
    checker = Checker.check(found)
    assert all((folder / link).is_file() for link in checker.files)
    return found


# ------------------------------------------------------------------------------------ the numbers


def test_table_1_has_mean_spread_paper_and_difference(store: Store) -> None:
    fill_set(store)
    found = tables(store)["accuracy"]
    assert [row["method"] for row in found] == ["No regularization", "Dropout", "DropConnect", "DropConnect++"]
    line, expected = found[3], summarise(ACCURACY["dropconnect++"])
    assert (line["n"], line["mean"]) == (4, pytest.approx(77.2))
    assert (line["standard_deviation"], line["interval"]) == (expected.standard_deviation, expected.interval)
    assert (line["paper"], line["difference"]) == (76.54, pytest.approx(0.66))
    assert [row["best"] for row in found] == [False, False, False, True]
    cells = next(row for row in text(store).splitlines() if row.startswith("DropConnect++"))
    assert cells.split() == ["DropConnect++", "77.20*", "76.91", "to", "77.49", "0.18", "4", "76.54", "+0.66"]
    assert "<strong>77.20</strong>" in page(store)


def test_best_is_marked_only_where_it_beats_every_other(store: Store) -> None:
    for kind, values in {"dropout": [75.0, 76.0, 77.0], "dropconnect++": [75.5, 76.6, 77.4]}.items():
        fill(store, chosen("cifar10", kind), {r: result(v, kind, r) for r, v in enumerate(values)})
    fill_set(store, "svhn", ["none", "dropout"])  # a better method that is not ours
    found = tables(store)["accuracy"]
    assert [row["best"] for row in found] == [False, False, False, True]


def test_the_epoch_of_the_lowest_nll_is_shown_beside_the_last(store: Store) -> None:
    fill_set(store, kinds=["dropout"])
    (row,) = tables(store)["lowest_nll"]
    assert (row["epoch"], row["last_epoch"], row["n"]) == (10, 100, 4)
    assert (row["mean"], row["last_mean"]) == pytest.approx((1.015, 1.105))
    assert row["interval"] == pytest.approx(summarise([1.0, 1.01, 1.02, 1.03]).interval)
    points = [(one["rule"], one["epoch"]) for one in tables(store)["likelihood"]]
    assert points == [(rule, epoch) for rule in ("Monte Carlo", "one pass") for epoch in (1, 5, 10, 50, 100)]
    assert "When is NLL lowest?" in page(store)


def test_a_data_set_has_its_own_name_in_tables(store: Store) -> None:
    for data in ("fashion-mnist", "svhn", "fashion-mini"):
        fill(store, chosen(data, "none"), {0: result(75.0, "none")})
    assert [row["title"] for row in tables(store)["accuracy"]] == ["SVHN", "fashion-mini", "Fashion-MNIST"]


def test_the_best_is_chosen_among_all_pairs(store: Store) -> None:
    worse = [75.0, 75.4, 75.8, 76.2]
    best = [value + 1.1 for value in worse]
    p = welch(best, worse).p
    assert max(holm([p, p])) < SIGNIFICANCE < max(holm([p, p, 1.0])[:2])
    for kind, values in {"none": worse, "dropout": worse, "dropconnect++": best}.items():
        fill(store, chosen("cifar10", kind), {r: result(v, kind, r) for r, v in enumerate(values)})
    assert not any(row["best"] for row in tables(store)["accuracy"])


def test_pairs_are_tested_three_ways_and_adjusted(store: Store) -> None:
    fill_set(store)
    found = tables(store)["significance"]
    assert [row["other"] for row in found] == ["No regularization", "Dropout", "DropConnect"]
    ours = ACCURACY["dropconnect++"]
    for name, test in {"student": student, "welch": welch}.items():
        comparisons = [test(ours, ACCURACY[kind]) for kind in paper_values.KINDS[:3]]
        assert [row[name]["p"] for row in found] == [c.p for c in comparisons]
        assert tuple(row[name]["adjusted_p"] for row in found) == holm([c.p for c in comparisons])
    by_replica = [dict(enumerate(ACCURACY[kind])) for kind in paper_values.KINDS[:3]]
    assert [row["paired"]["t"] for row in found] == [paired(dict(enumerate(ours)), other).t for other in by_replica]
    assert {row["paper"] for row in found} == {"significantly better"}
    assert found[1]["sentence"].startswith("DropConnect++ beats Dropout by 1.65 points, 95% interval")
    assert "Holm-adjusted p" in page(store)


def test_paper_verdict_knows_its_one_exception() -> None:
    assert paper_values.verdict("svhn", "dropconnect++", "dropout") == "comparable"
    assert paper_values.verdict("svhn", "dropconnect++", "dropconnect") == "significantly better"
    assert paper_values.verdict("fashion-mini", "dropconnect++", "dropout") is None


def test_a_method_that_the_paper_has_not_has_no_value_beside_it(store: Store) -> None:
    fill_set(store)
    protocol = chosen("cifar10", "dropconnect++")
    other = replace(protocol, method=replace(protocol.method, hyper="optimal"))
    fill(store, other, {r: result(76.0 + 0.1 * r, "dropconnect++", r) for r in range(4)})
    found = tables(store)
    beside = {row["method"]: row["paper"] for row in found["accuracy"]}
    assert beside["DropConnect++"] == 76.54
    assert beside["Dropout"] == 75.70  # at whatever rate
    assert beside[other.method.label] is None
    said = {(row["method"], row["other"]): row["paper"] for row in found["significance"]}
    assert said[("DropConnect++", "DropConnect")] == "significantly better"
    assert said[(other.method.label, "DropConnect")] is None
    assert all(row["paper"] is None for row in found["samples"] if row["method"] == other.method.label)


def test_paper_values_are_those_of_its_tables() -> None:
    assert [paper_values.ACCURACY[data]["dropconnect++"] for data in paper_values.TITLES] == [
        76.54,
        47.01,
        91.99,
        93.75,
    ]
    assert [paper_values.SECONDS["svhn"][kind] for kind in paper_values.KINDS] == [15, 15, 15, 19]
    assert paper_values.mc_accuracy("norb", "dropconnect++", 100) == 91.41
    assert paper_values.mc_accuracy("norb", "dropout", 100) is None
    assert sum(paper_values.SHARES.values()) == pytest.approx(1.0)


def test_table_2_has_seconds_ratios_and_predictions(store: Store) -> None:
    digests = fill_set(store, kinds=["none", "dropconnect++"])
    common = {"replicas": 50, "device": "Some GPU"}
    timings = {"seconds_per_epoch": 2.0, **common, "prediction": {"none": 0.01}}
    store.write_note(digests[0], "timings", timings)
    prediction = {"dropout": 0.01234, "mean": 0.5, "mc30": math.nan}
    # Timings may stand beside the protocol whose choices were still open.
    store.write_note(store.add(paper("cifar10", "dropconnect++")), "selection", {"resolved": digests[1]})
    store.write_note(digests[0], "selection", {"resolved": digests[0]})
    timings = {"seconds_per_epoch": 2.345678, **common, "prediction": prediction}
    store.write_note(paper("cifar10", "dropconnect++").digest, "timings", timings)
    found = tables(store)["time"]
    ours = line_of(found, method="DropConnect++")
    assert (ours["ratio"], ours["paper"]) == (pytest.approx(1.172839), 10)
    assert ours["paper_ratio"] == pytest.approx(10 / 9)
    shown = text(store)
    assert re.search(r"^DropConnect\+\+ +2\.35 +1\.17 +50 +10 +1\.11 +Some GPU$", shown, re.MULTILINE)
    assert re.search(r"^DropConnect\+\+ +– +0\.0123 +0\.500$", shown, re.MULTILINE)
    assert "Some GPU" in page(store)


def test_ratios_need_like_conditions_and_timings_need_no_rows(store: Store) -> None:
    plain, ours = chosen("cifar10", "none"), paper("cifar10", "dropconnect++")
    for protocol, replicas in ((plain, 50), (ours, 10)):
        store.write_note(store.add(protocol), "timings", {"seconds_per_epoch": 2.0, "replicas": replicas})
    found = tables(store)["time"]
    assert [(row["method"], row["ratio"]) for row in found] == [("No regularization", 1.0), ("DropConnect++", None)]
    assert "Table 2" in page(store)


def test_table_3_has_samples_beside_one_pass(store: Store) -> None:
    fill_set(store)
    found = [row for row in tables(store)["samples"] if row["kind"] == "dropconnect++"]
    assert [row["samples"] for row in found] == [1, 30, 500, None]
    assert [row["paper"] for row in found] == [74.57, 75.95, 76.36, 76.54]
    assert [row["mean"] for row in found] == pytest.approx([75.2, 77.2 - 2 / 30, 77.2 - 2 / 500, 77.2])
    assert not [row for row in tables(store)["samples"] if row["kind"] == "none"]
    assert re.search(r"^Eq\. \(19\) +77\.20 +76\.91 to 77\.49 +0\.18 +4 +76\.54 +\+0\.66$", text(store), re.MULTILINE)


def test_shares_correlation_calibration_and_uncertainty(store: Store) -> None:
    fill_set(store)
    found = tables(store)
    (shares,) = found["shares"]
    assert (shares["n"], shares["synapses"], shares["below_0.35"]) == (4, 1000, pytest.approx(0.15))
    assert shares["between_0.4_and_0.6"] == pytest.approx(0.65)
    assert shares["paper_below_0.35"] == pytest.approx(1 / 6)
    assert [row["mean"] for row in found["correlation"]] == [pytest.approx(0.265)]
    assert found["calibration"][0]["nll"]["mean"] == pytest.approx(0.715)
    information = [row for row in found["uncertainty"] if row["kind"] == "dropout"]
    assert [(row["images"], row["mean"]) for row in information] == [
        ("", pytest.approx(0.115)),
        ("svhn", pytest.approx(0.315)),
    ]
    half = line_of(found["pruning"], kind="dropconnect++", score="keep_probability", share=0.5)
    assert half["mean"] == pytest.approx(77.2 - 2.5)
    shown = page(store)
    assert "The paper, around" in shown
    assert "16.7%" in shown


# ------------------------------------------------------------------------------------ what is shown


def test_only_selected_protocols_are_shown(store: Store) -> None:
    """Trials of a step size have the test set's protocol in all but length; a held-out trial differs in holdout."""
    incomplete, final = paper("cifar10", "dropout"), chosen("cifar10", "dropout")
    digest = fill(store, final, {0: result(75.0, "dropout"), 1: result(76.0, "dropout")})
    step_trial = fill(store, chosen("cifar10", "dropout", epochs=3), {0: result(33.0, "dropout")})
    rate_trial = fill(store, chosen("cifar10", "dropout", holdout=5000), {0: result(44.0, "dropout")})
    for trial in (step_trial, rate_trial):
        store.write_note(trial, "trial", True)
    other = fill(store, chosen("cifar10", "none"), {0: result(74.0, "none")})
    store.write_note(other, "selection", {"resolved": other, "step_trials": [], "rate_trials": []})
    evidence = {
        "resolved": digest,
        "step_size": 0.01,
        "rate": 0.5,
        "step_trials": [{"step_size": 0.01, "loss": 1.23456, "n": 3}, {"step_size": 0.05, "loss": math.nan, "n": 3}],
        "rate_trials": [{"rate": 0.5, "accuracy": 74.321, "n": 3}],
    }
    store.write_note(store.add(incomplete), "selection", evidence)
    assert {row["digest"] for row in tables(store)["accuracy"]} == {digest, other}
    shown = page(store)
    assert "33.00" not in shown
    assert "44.00" not in shown
    assert all(trial in shown for trial in (step_trial, rate_trial))  # named as left out
    assert "1.2346" in shown
    assert "74.32" in shown


def test_settings_chosen_together_are_shown_beside_the_papers_choice(store: Store) -> None:
    incomplete = store.add(paper("cifar10", "dropout"))
    for rate, way in ((0.5, "selection"), (0.8, "selection together")):
        protocol = chosen("cifar10", "dropout")
        protocol = replace(protocol, method=replace(protocol.method, rate=rate))
        digest = fill(store, protocol, {r: result(75.0 + rate + r, "dropout") for r in range(2)})
        trial = {"step_size": 0.01, "rate": rate, "accuracy": 77.25, "n": 3}
        note = {"resolved": digest, "step_size": 0.01, "rate": rate}
        trials = {"together_trials": [trial]} if way.endswith("together") else {"rate_trials": [{**trial, "rate": 0.4}]}
        store.write_note(incomplete, way, note | trials)
    for name, given in (
        ("command", "dcpp run a"),
        ("command together", "dcpp run b"),
        ("timing command", "dcpp run c"),
    ):
        store.write_note(incomplete, name, given)
    store.write_note(incomplete, "timings", {"seconds_per_epoch": 1.5, "replicas": 1})
    assert [row["method"] for row in tables(store)["accuracy"]] == ["Dropout (rate=0.5)", "Dropout (rate=0.8)"]
    assert [row["method"] for row in tables(store)["time"]] == ["Dropout (rate=0.5)"], "the paper's way was timed"
    usual, together = (evidence(e, store.notes()) for e in select_experiments(store.rows(), store.notes()).experiments)
    assert usual.commands == ("dcpp run a", "dcpp run c")
    assert together.commands == ("dcpp run b",)
    shown = page(store)
    assert "Step size 0.01 and rate 0.8, chosen together by the accuracy on held-out training data" in shown
    assert '<th scope="row">0.01, 0.8</th>' in shown


def test_without_selection_everything_not_held_out_is_shown(store: Store) -> None:
    for rate in (0.25, 0.5):
        protocol = chosen("cifar10", "dropout")
        protocol = replace(protocol, method=replace(protocol.method, rate=rate))
        fill(store, protocol, {0: result(75.0 + rate, "dropout")})
    fill(store, chosen("cifar10", "dropout", holdout=5000), {0: result(44.0, "dropout")})
    assert [row["method"] for row in tables(store)["accuracy"]] == ["Dropout (rate=0.25)", "Dropout (rate=0.5)"]


def test_a_trial_that_was_chosen_is_shown_and_the_others_are_left_out(store: Store) -> None:
    digest = fill_set(store, kinds=["dropout"])[0]
    store.write_note(store.add(paper("cifar10", "dropout")), "selection", {"resolved": digest})
    trial = fill(store, chosen("svhn", "dropout", epochs=3), {0: result(33.0, "dropout")})
    for one in (digest, trial):
        store.write_note(one, "trial", True)
    assert [row["data"] for row in tables(store)["accuracy"]] == ["cifar10"]
    assert f"Left out, as trials or evaluated on held-out training data: {trial}." in page(store)


def test_variants_of_an_experiment_stand_apart(store: Store) -> None:
    for epochs in (3, 100):
        fill(store, chosen("cifar10", "dropconnect++", epochs=epochs), {0: result(70.0, "dropconnect++")})
    titles = [row["title"] for row in tables(store)["accuracy"]]
    assert titles == ["CIFAR-10 (epochs=100)", "CIFAR-10 (epochs=3)"]
    assert "CIFAR-10 (epochs=3): trained for 3 epochs here." in page(store)


def test_several_data_sets_get_an_overview(store: Store) -> None:
    fill_set(store, "svhn")
    fill_set(store, "cifar10")
    fill_set(store, "fashion-mini", ["dropconnect++"])
    shown = text(store)
    assert re.search(r"^Method +CIFAR-10 +SVHN +fashion-mini$", shown, re.MULTILINE)
    assert re.search(r"^Dropout +75\.55 \(75\.70\) +75\.55 \(92\.14\) +–$", shown, re.MULTILINE)
    assert line_of(tables(store)["accuracy"], data="fashion-mini")["paper"] is None
    page(store)


def test_columns_that_say_nothing_are_left_out(store: Store) -> None:
    fill_set(store, "fashion-mini")
    assert re.search(r"^Method +Mean +95% interval +SD +n$", text(store), re.MULTILINE)
    assert "Paper" not in text(store)


def test_diverged_and_missing_replicas_are_said(store: Store) -> None:
    fill_set(store, kinds=["none"])
    ours = {r: result(77.0 + r, "dropconnect++", r) for r in range(2)}
    lost = {"diverged_at": 7, "losses": [2.0, math.nan], "curve": [{"epoch": 1, "accuracy": 10.0, "nll": math.inf}]}
    digest = fill(store, chosen("cifar10", "dropconnect++"), {**ours, 2: lost}, diverged=[2])
    store.claim([(digest, 3)], Owner.here())
    line = line_of(tables(store)["accuracy"], kind="dropconnect++")
    assert (line["n"], line["mean"], line["diverged"], line["missing"]) == (2, 77.5, [2], [3])
    shown = page(store, drawn=True)
    assert "1 diverged (2); 1 missing (3; 1 running)" in shown
    assert "2 (epoch 7)" in shown
    assert "Diverged replicas are left out." in shown


def test_unverified_data_is_marked_and_explained(store: Store) -> None:
    official, changed = fill_set(store, "svhn", ["none"])[0], {"source": "a mirror", "verified": False}
    fill(store, chosen("cifar10", "none"), {0: result(74.0, "none")}, provenance=changed)
    found = tables(store)["accuracy"]
    assert [(row["digest"] == official, row["verified"]) for row in found] == [(False, False), (True, True)]
    shown = page(store)
    assert "CIFAR-10 †" in shown
    assert "SVHN †" not in shown
    assert "do not have the official checksums" in shown
    assert "a mirror" in shown


def test_evidence_is_on_the_page(store: Store) -> None:
    (digest,) = fill_set(store, kinds=["dropconnect++"])
    shown = page(store, command="dcpp run table1 --repeats 4")
    for fact in (digest, "0-3", "Some GPU", "torch: 2.13.0", "abc1234", "files of the owner", "data_batch_1: c99c"):
        assert fact in shown
    assert "<code>dcpp run table1 --repeats 4</code>" in shown
    assert "<dt>training.step_size</dt><dd>0.01</dd>" in shown


# ------------------------------------------------------------------------------------ the page


def test_same_store_gives_the_same_bytes(store: Store, path: Path, tmp_path: Path) -> None:
    fill_set(store)
    build(path, tmp_path / "a", command="x")
    program = f"from dropconnectpp.lab.report import build; build({str(path)!r}, {str(tmp_path / 'b')!r}, command='x')"
    environment = {"PYTHONHASHSEED": "7", "HOME": str(tmp_path), "SOURCE_DATE_EPOCH": "1", "TZ": "Asia/Tokyo"}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)
    first, second = contents(tmp_path / "a"), contents(tmp_path / "b")
    assert first == second
    assert not [name for name, content in first.items() if str(tmp_path).encode() in content]
    assert {Path(name).suffix for name in first} == {".html", ".md", ".tex", ".csv", ".svg", ".png", ".pdf", ""}


EVIL = "<script>alert(1)</script>"


def test_names_from_outside_are_escaped(store: Store) -> None:
    fill_with_evil(store, EVIL)
    shown = page(store, command=EVIL, drawn=True)
    assert shown.count("<script") == 1
    assert "alert(1)</script>" not in shown
    assert shown.count("&lt;script&gt;alert(1)&lt;/script&gt;") > 20


def test_page_suits_screens_and_readers(store: Store) -> None:
    fill_set(store)
    shown = page(store, drawn=True)
    assert 'name="viewport" content="width=device-width' in shown
    assert "prefers-color-scheme: dark" in shown
    assert shown.count("<caption>") == shown.count("<table>") > 5
    assert '<button type="button" id="theme" hidden>' in shown  # without its script it would do nothing
    for tag in re.findall(r"<th[ >][^>]*", shown):
        assert "scope=" in tag
    drawings = re.findall(r'<svg [^>]*class="plot".*?</svg>', shown, re.DOTALL)
    assert len(drawings) == 12  # convergence 2, likelihood 2, keep probabilities 2, reliability 2, pruning 4
    for plot in drawings:
        assert "<title" in plot
        assert "<desc" in plot
        assert not re.search(r"#[0-9a-f]{6}\b(?!\d)", re.sub(r'(id|href)="[^"]*"|url\([^)]*\)', "", plot))


@pytest.mark.parametrize(
    "gone", [["mc"], ["posterior"], ["curve"], ["pruning", "uncertainty", "foreign"], ["nll", "ece", "brier"]], ids=str
)
def test_missing_results_leave_the_rest(store: Store, gone: list[str]) -> None:
    for kind in ("dropout", "dropconnect++"):
        whole = {r: result(ACCURACY[kind][r], kind, r) for r in range(2)}
        part = {r: {k: v for k, v in found.items() if k not in gone} for r, found in whole.items()}
        fill(store, chosen("cifar10", kind), part)
    assert "77.20" in page(store, drawn=True)


def test_results_of_other_shapes_do_not_stop_a_report(store: Store) -> None:
    """What an older or a foreign version stored: other types, numbers that are not finite, lists of another length."""
    strange: dict[str, Any] = dict.fromkeys(result(1.0, "dropconnect++"), math.nan)
    uneven = result(77.0, "dropconnect++")
    uneven["posterior"]["histogram"] = [1, 2, 3]
    uneven["posterior"]["quantiles"] = []
    uneven["mc"] = [{"samples": 30}, 5, None, {"samples": "x", "accuracy": 1.0}]
    uneven["curve"] = [{"epoch": 1, "accuracy": math.nan}, {}]
    results = {0: uneven, 1: strange, 2: {}, 3: dict.fromkeys(strange, "text"), 4: result(76.0, "dropconnect++")}
    digest = fill(store, chosen("cifar10", "dropconnect++"), results, versions={"x": math.nan}, provenance={})
    store.write_note(digest, "timings", [1, 2])
    store.write_note(digest, "selection", "text")
    (line,) = tables(store)["accuracy"]
    assert (line["n"], line["not_finite"]) == (2, [1, 2, 3])
    assert "3 without a finite accuracy (1-3)" in page(store, drawn=True)


def test_empty_store(store: Store) -> None:
    assert "There are no results yet." in page(store)
    assert text(store) == "There are no results yet."
    fill(store, chosen("cifar10", "none", holdout=5000), {0: result(70.0, "none")})
    for said in (page(store), text(store)):
        assert "There are no results on a test set yet." in said
        assert "dcpp results" in said
    assert not any(tables(store).values())


def test_one_replica_of_each_method(store: Store) -> None:
    fill_set(store, n=1)
    found = tables(store)
    assert {(row["n"], row["interval"], row["best"]) for row in found["accuracy"]} == {(1, None, False)}
    why = "DropConnect++ and Dropout were not tested: a test needs two replicas of each, there are 1 and 1."
    assert why in page(store)


def test_one_method_only(store: Store) -> None:
    fill_set(store, kinds=["dropconnect++"])
    found = tables(store)
    assert [row["best"] for row in found["accuracy"]] == [False]
    assert not found["significance"]
    assert "Significance" not in page(store)


def test_no_spread_is_said(store: Store) -> None:
    for kind, value in {"dropout": 75.0, "dropconnect++": 76.0}.items():
        fill(store, chosen("cifar10", kind), {r: {"accuracy": value} for r in range(3)})
    assert "were not tested: neither varies from replica to replica." in page(store)


def test_nothing_but_diverged_replicas(store: Store) -> None:
    lost = {r: {"diverged_at": 1, "losses": [], "curve": []} for r in range(2)}
    fill(store, chosen("cifar10", "dropconnect++"), lost, diverged=[0, 1])
    shown = page(store, drawn=True)
    assert "1 method on CIFAR-10: 0 networks trained to the end, 2 diverged." in shown
    assert "2 diverged (0, 1)" in shown


def test_no_store_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no store to read"):
        build(tmp_path / "nothing.sqlite", tmp_path)


def test_reports_are_built_without_torch(store: Store, path: Path, tmp_path: Path) -> None:
    fill_set(store, kinds=["dropconnect++"], n=2)
    program = f"""
import sys
from dropconnectpp.lab.report import build, text
build({str(path)!r}, {str(tmp_path / "site")!r}, figures=False)
print(text({str(path)!r}))
sys.exit("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "DropConnect++" in done.stdout


def test_a_terminal_shows_the_tables_that_were_named(store: Store, path: Path) -> None:
    fill_set(store)
    whole = report.text(path)
    shown = report.text(path, only=["significance", "accuracy"])
    assert shown.startswith("Table 1. Accuracy")
    assert "Is the difference more than chance?" in shown
    assert "Table 3" not in shown
    assert "Table 3" in whole
    with pytest.raises(ArgumentError, match=r"only must be one of 'overview', 'accuracy', .*; got 'convergence'"):
        report.text(path, only=["convergence"])  # a figure


def test_the_papers_values_stand_beside_the_papers_network_only(store: Store) -> None:
    usual = chosen("cifar10", "dropconnect++")
    fill(store, usual, {0: result(76.0, "dropconnect++")})
    fill(store, replace(usual, architecture=replace(usual.architecture, hidden=16)), {0: result(50.0, "dropconnect++")})
    found = {row["mean"]: row["paper"] for row in tables(store)["accuracy"]}
    assert found == {76.0: 76.54, 50.0: None}

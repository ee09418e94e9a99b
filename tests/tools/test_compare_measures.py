"""Methods compared measure by measure, against the same comparisons made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tool_cases import lines

from dropconnectpp.lab.config import protocol
from dropconnectpp.lab.config.method import Method
from dropconnectpp.lab.report import statistics
from dropconnectpp.lab.report.views.cells import TRUST_NOTES, UNVERIFIED
from dropconnectpp.lab.runs.owner import Owner
from dropconnectpp.lab.runs.store import Store
from scripts import call


def test_methods_are_compared_measure_by_measure(tmp_path: Path) -> None:
    ours, other, apart = "DropConnect++ (hyper=optimal)", "DropConnect", ", step size 0.01"
    random = torch.Generator().manual_seed(0)
    found: dict[str, list[dict[str, Any]]] = {}
    me = Owner.here()
    with Store.open(tmp_path / "results.sqlite") as store:
        for method in (Method(hyper="optimal"), Method(kind="dropconnect", rate=0.5)):
            for holdout in (0, 10):
                training = protocol.Training(step_size=0.01, holdout=holdout)
                digest = store.add(protocol.Protocol(data="svhn", method=method, training=training))
                for key in store.claim([(digest, replica) for replica in range(4)], me):
                    results = some_results(random)
                    store.finish(key, me, "done", results=results, seconds=1.0, device="none")
                    if not holdout:
                        found.setdefault(method.label, []).append(results)
    options = (str(tmp_path / "results.sqlite"), "--dataset", "svhn", "--methods")
    made = call("tools/compare_measures.py", *options, ours, "--out", str(tmp_path / "compared.md"))
    assert made.returncode == 0, made.stderr
    rows = lines((tmp_path / "compared.md").read_text())
    itself = ["itself, by size", "itself, by π̃·size", "itself, whole"]
    assert [row[2] for row in rows] == [other] * 5 + [f"{other}, by size", *itself] * 2
    assert [row[1] for row in rows[5::4]] == [f"accuracy with {share} kept by π̃, %" for share in ("10%", "5%")]
    mine, theirs = ([one["nll"] for one in found[label]] for label in (ours, other))
    expected = [sum(mine) / 4, sum(theirs) / 4, statistics.welch(mine, theirs).difference]
    assert rows[1][:2] == [ours, "NLL"]
    assert [float(cell) for cell in rows[1][3:6]] == pytest.approx(expected, abs=1e-4)
    cut, size = ({r: one["pruning"][place]["accuracy"] for r, one in enumerate(found[ours])} for place in (3, 0))
    paired = statistics.paired(cut, size)
    assert float(rows[6][5]) == pytest.approx(paired.difference, abs=0.01)
    assert float(rows[6][7]) == pytest.approx(paired.p, abs=1e-4)
    assert float(rows[6][8]) >= float(rows[6][7])
    unknown = call("tools/compare_measures.py", *options, ours + apart, "--held-out", "--against", other)
    assert unknown.returncode == 1
    assert f"There are: {ours}{apart}, {other}, rate 0.5{apart}." in unknown.stderr
    against = ["--against", f"{other}, rate 0.5{apart}", "--call", f"{other}, rate 0.5{apart}", "fixed"]
    held_out = call("tools/compare_measures.py", *options, ours + apart, "--held-out", *against)
    assert len(lines(held_out.stdout)) == 13
    assert [row[2] for row in lines(held_out.stdout)[4:6]] == ["fixed", "fixed, by size"]
    assert lines(held_out.stdout)[1][3] != rows[1][3]


@pytest.mark.parametrize("verified", [True, False])
def test_the_note_on_data_that_is_not_official_is_below_the_table_on_request(tmp_path: Path, verified: bool) -> None:
    random, me = torch.Generator().manual_seed(0), Owner.here()
    with Store.open(tmp_path / "results.sqlite") as store:
        for method in (Method(), Method(kind="dropconnect", rate=0.5)):
            digest = store.add(protocol.Protocol(data="svhn", method=method))
            for key in store.claim([(digest, replica) for replica in range(2)], me):
                of_the_run = {"provenance": {"verified": verified}, "seconds": 1.0, "device": "none"}
                store.finish(key, me, "done", results=some_results(random), **of_the_run)
    options = (str(tmp_path / "results.sqlite"), "--dataset", "svhn", "--methods", "DropConnect++")
    without = call("tools/compare_measures.py", *options)
    assert without.returncode == 0, without.stderr
    noted = call("tools/compare_measures.py", *options, "--trust-notes").stdout
    note = f"\n{TRUST_NOTES[UNVERIFIED]}\n"
    assert noted == (without.stdout if verified else without.stdout.removesuffix("\n") + note + "\n")


def some_results(random: torch.Generator) -> dict[str, Any]:
    """What a network is judged by, by chance; of the shares that are kept two are compared."""
    accuracy, nll, averaged, brier, ece, *cut = torch.rand(8, generator=random).tolist()
    pruning = [
        {"score": score, "share": share, "accuracy": value + share}
        for score, value in zip(("magnitude", "keep_probability", "product"), cut, strict=True)
        for share in (0.1, 0.05, 0.5)
    ]
    probabilities = {"nll": nll, "uncertainty": {"nll": averaged}, "brier": brier, "ece": ece}
    return {"accuracy": accuracy, **probabilities, "pruning": pruning, "posterior": {"standard_deviation": 0.1}}

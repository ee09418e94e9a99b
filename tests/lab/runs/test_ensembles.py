"""Ensembles of networks that train one by one: judged when all members are there, whatever stacks they were in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from run_cases import Diary
from tiny_cases import EVALUATION, TINY, tiny

from dropconnectpp import metrics
from dropconnectpp.lab.config.ensembles import Ensemble
from dropconnectpp.lab.config.experiments import Experiment
from dropconnectpp.lab.config.method import METHODS, Method
from dropconnectpp.lab.config.protocol import Protocol
from dropconnectpp.lab.config.settings import ProtocolError
from dropconnectpp.lab.replicas.judging import TEST
from dropconnectpp.lab.runs import execution
from dropconnectpp.lab.runs.predictions import Images, Logs, Predictions
from dropconnectpp.lab.runs.runner import Runner
from dropconnectpp.lab.runs.store import Row

DATASET, FOREIGN = tiny(), tiny("other", seed=5)
JUDGED = replace(EVALUATION, judged=True, foreign="other", corruptions=("pixelate",))
BASE = replace(TINY, evaluation=JUDGED)
METHODS_TRIED = (METHODS["none"], Method(kind="dropout", rate=0.5))


def experiment(repeats: int = 7, members: int = 3) -> Experiment:
    protocols = tuple(replace(BASE, method=method) for method in METHODS_TRIED)
    return Experiment(protocols=protocols, repeats=repeats, ensembles=members)


def runner(out: Path, **options) -> Runner:
    load = {"tiny": DATASET, "other": FOREIGN}.__getitem__
    return Runner(out, torch.device("cpu"), load, Diary(), **options)


def ensembles(own: Runner, protocol: Protocol, members: int = 3) -> list[Row]:
    with own.store() as store:
        return store.rows(store.add(Ensemble(of=protocol, members=members)))


def files(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "predictions").glob("*")) if (out / "predictions").exists() else []


def test_each_ensemble_is_judged_once_its_members_are_trained(tmp_path: Path) -> None:
    own = runner(tmp_path, group=4)  # the ensembles lie across stacks
    wanted = experiment()
    assert execution.train(wanted, own)
    for protocol in wanted.protocols:
        rows = ensembles(own, protocol)
        assert [row.key.replica for row in rows] == [0, 1]
        assert [row.results["members"] for row in rows] == [[0, 1, 2], [3, 4, 5]]
        assert all({e["prediction"] for e in row.results["judged"]} == {"ensemble"} for row in rows)
        assert len(rows[0].results["judged"]) == 1 + 1 + 5
        assert rows[0].provenance["data"] == "tiny"
    # Only the replicas that no ensemble has are kept, for more of them later.
    assert files(tmp_path) == sorted(f"{protocol.digest}-6.npz" for protocol in wanted.protocols)


def average(members: list[dict[Images, Logs] | None], images: Images) -> torch.Tensor:
    return torch.from_numpy(np.mean([np.exp(logs[images].astype(float)) for logs in members if logs], 0))


def test_it_is_the_average_of_its_members_probabilities(tmp_path: Path) -> None:
    own = runner(tmp_path)
    own.predictions.forget = lambda keys: None  # type: ignore[method-assign]
    wanted = experiment(repeats=3)
    assert execution.train(wanted, own)
    labels = torch.from_numpy(np.array(DATASET.test.labels))
    for protocol in wanted.protocols:
        members = [own.predictions.read((protocol.digest, replica)) for replica in range(3)]
        (row,) = ensembles(own, protocol)
        for one in row.results["judged"]:
            if one["images"] == "foreign":
                doubts = [torch.special.entr(average(members, images)).sum(1) for images in (TEST, ("foreign", 0))]
                assert one["auroc"] == pytest.approx(metrics.auroc(*doubts), abs=1e-3)
                assert one["data"] == "other"
                continue
            mean = average(members, (one["images"], one["severity"]))
            assert one["nll"] == pytest.approx(float(metrics.nll(mean, labels).mean()))
            assert one["ece"] == pytest.approx(metrics.ece(mean, labels))
        assert row.results["nll"] == row.results["judged"][0]["nll"]


def test_a_run_that_was_stopped_goes_on_to_the_same_ensembles(tmp_path: Path) -> None:
    whole, parts = runner(tmp_path / "whole", group=4), tmp_path / "parts"
    wanted = experiment()
    assert execution.train(wanted, whole)
    assert execution.train(replace(wanted, repeats=4), runner(parts, group=2))
    assert len(files(parts)) == 2
    own = runner(parts, group=3)
    assert execution.train(wanted, own)
    for protocol in wanted.protocols:
        one, other = ([row.results for row in ensembles(each, protocol)] for each in (whole, own))
        assert one == other
    before = {row.key: row.finished for protocol in wanted.protocols for row in ensembles(own, protocol)}
    assert execution.train(wanted, own)
    assert before == {row.key: row.finished for protocol in wanted.protocols for row in ensembles(own, protocol)}


def test_predictions_that_are_gone_or_damaged_are_told(tmp_path: Path) -> None:
    own = runner(tmp_path)
    assert execution.train(replace(experiment(), repeats=3, ensembles=3), own)
    own = runner(tmp_path, group=4)
    path = tmp_path / "predictions"
    wanted = replace(experiment(repeats=5), protocols=experiment().protocols[:1])
    assert execution.train(wanted, own)  # replicas 3 and 4 wait for 5
    assert len(files(tmp_path)) == 2
    first, second = sorted(path.iterdir())
    first.write_bytes(first.read_bytes()[:-200])
    second.unlink()
    own = runner(tmp_path)
    assert execution.train(replace(wanted, repeats=6), own)
    assert isinstance(own.display, Diary)
    assert any("3.npz: damaged" in note for note in own.display.notes)
    assert any("Ensemble of 3: 1 cannot be judged, since a member diverged" in note for note in own.display.notes)
    assert [row.key.replica for row in ensembles(own, wanted.protocols[0])] == [0]


def test_predictions_come_back_as_they_were_kept(tmp_path: Path) -> None:
    told: list[str] = []
    kept = Predictions(tmp_path / "predictions", told.append)
    logs = {("test", 0): np.float32([[-0.1, -2.5]]), ("jpeg_compression", 3): np.float32([[-1.0, -0.5]])}
    assert kept.read(("abc", 7)) is None
    kept.write(("abc", 7), logs)
    found = kept.read(("abc", 7))
    assert found is not None
    assert found.keys() == logs.keys()
    assert all((found[name] == values).all() for name, values in logs.items())
    kept.forget([("abc", 7), ("abc", 8)])
    assert not (tmp_path / "predictions").exists()
    assert told == []


def test_an_ensemble_has_an_identity_of_its_own() -> None:
    one = Ensemble(of=BASE, members=3)
    assert one.label == "Ensemble of 3, DropConnect++"
    assert Ensemble(of=replace(BASE, method=METHODS["none"])).label == "Ensemble of 5"
    assert len({one.digest, BASE.digest, Ensemble(of=BASE, members=4).digest}) == 3
    assert one.complete_in(range(2, 9)) == [1, 2]


def test_what_cannot_be_judged_is_an_error() -> None:
    with pytest.raises(ProtocolError, match=r"must be judged: set evaluation\.judged"):
        replace(experiment(), protocols=(TINY,))
    with pytest.raises(ProtocolError, match="ensembles of 3 need as many repeats, got 2"):
        experiment(repeats=2)
    with pytest.raises(ProtocolError, match="members of an ensemble must be at least 2"):
        experiment(members=1)
    held_out = replace(BASE, training=replace(BASE.training, holdout=8))
    with pytest.raises(ProtocolError, match="leave out the holdout"):
        replace(experiment(), protocols=(held_out,))

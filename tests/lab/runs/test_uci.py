"""The UCI benchmark: what chooses and what is measured, apart from each other; rows that resume."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_cases import host
from scipy import stats
from uci_cases import SHORT, SPLITS, made

from dropconnectpp.lab.config.settings import ProtocolError
from dropconnectpp.lab.config.uci import FACTORS, KINDS, NOISY, PLAIN, Kind, Regression, Setting, Training
from dropconnectpp.lab.data.dataset import RegressionSet
from dropconnectpp.lab.runs import uci, uci_splits
from dropconnectpp.lab.runs.owner import Owner
from dropconnectpp.lab.runs.store import Store


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> RegressionSet:
    return made(tmp_path_factory.mktemp("given") / "yacht")


def experiment(kind: Kind = "dropconnect++") -> Regression:
    settings = (Setting(0.0, 0.1), Setting(0.0, 3.0)) if kind in ("plain", "ensemble") else NOISY[:2]
    return Regression(data="uci:yacht", kind=kind, training=SHORT, settings=settings)


def test_every_method_tries_as_many_settings() -> None:
    counts = {
        kind: len(Regression(data="uci:yacht", kind=kind, training=SHORT).settings) * len(FACTORS) for kind in KINDS
    }
    assert set(counts.values()) == {8 * 17}
    assert len(set(NOISY)) == len(set(PLAIN)) == 8
    usual = [Training.usual("uci:yacht", 308), Training.usual("uci:protein-tertiary-structure", 45730)]
    assert [one.hidden for one in usual] == [50, 100]


@pytest.mark.parametrize("kind", KINDS)
def test_test_halves_choose_nothing(kind: Kind, data: RegressionSet) -> None:
    """Other targets in a split's test half change what is measured on it, and nothing else."""
    found = uci.measure(experiment(kind), data, [1])[0]
    y = data.y.copy()
    y[data.splits[1][1]] += np.random.default_rng(0).normal(0.0, 30.0, len(data.splits[1][1]))
    other = uci.measure(experiment(kind), replace(data, y=y), [1])[0]
    measured = {"log_likelihood", "rmse", "coverage"}
    assert {name: value for name, value in found.items() if name not in measured} == {
        name: value for name, value in other.items() if name not in measured
    }
    assert all(found[name] != other[name] for name in ("log_likelihood", "rmse"))
    assert ("keep_probability" in found) == (kind == "dropconnect++")
    assert (found["train"], found["test"]) == (48, 12)


def test_held_out_parts_are_apart_and_inside_the_training_split(data: RegressionSet) -> None:
    seen: list[int] = []
    for fold in range(2):
        rest, out = uci.parts(experiment(), data, 0, fold)
        assert not set(rest) & set(out)
        assert set(rest) | set(out) == set(data.splits[0][0])
        assert len(out) == 48 // 5
        seen += out.tolist()
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_scores_are_those_of_the_mixture(factor: float) -> None:
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(4, 2, 7, generator=generator, dtype=torch.float64)
    y = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    scales = torch.tensor([0.3, 1.5], dtype=torch.float64).view(1, 2, 1)
    mixture = uci.Mixture(outputs, scales, y)
    normal = stats.norm(outputs.numpy(), factor * scales.numpy())
    expected = np.log(normal.pdf(y.numpy()).mean(0)).mean(1)
    torch.testing.assert_close(mixture.log_likelihood([1.0, factor])[1], torch.from_numpy(expected))
    below = normal.cdf(y.numpy()).mean(0)
    inside = ((below > 0.05) & (below < 0.95)).mean(1)
    torch.testing.assert_close(mixture.coverage(torch.full((2,), factor).double()), torch.from_numpy(inside))
    rmse = np.sqrt(((outputs.numpy().mean(0) - y.numpy()) ** 2).mean(1))
    torch.testing.assert_close(mixture.rmse, torch.from_numpy(rmse))


def test_an_ensemble_is_the_mixture_of_its_members(data: RegressionSet) -> None:
    found = uci.measure(experiment("ensemble"), data, [0, 2])
    alone = uci.measure(experiment("plain"), data, [0, 2])
    assert [one["precision"] for one in found] == [one["precision"] for one in alone]
    again = uci.measure(experiment("ensemble"), data, [0, 2], [Setting(0.0, one["precision"]) for one in alone])
    assert again == found
    one = replace(experiment("ensemble"), training=replace(SHORT, members=1))
    assert uci.measure(one, data, [0])[0]["rmse"] == pytest.approx(alone[0]["rmse"], rel=1e-5)


def test_a_split_does_not_hang_on_its_neighbours(data: RegressionSet) -> None:
    together = uci.measure(experiment(), data, [0, 1, 2])
    for split in range(SPLITS):
        assert uci.measure(experiment(), data, [split])[0] == pytest.approx(together[split], rel=1e-3, abs=1e-3)


def test_a_run_resumes_and_repeats_nothing(data: RegressionSet, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []
    measure = uci.measure

    def counted(one, data, splits, *rest):
        asked.append(list(splits))
        return measure(one, data, splits, *rest)

    monkeypatch.setattr(uci, "measure", counted)
    monkeypatch.setattr(uci_splits, "SPLITS_AT_ONCE", 2)
    me = Owner.here()
    assert not uci_splits.run(experiment(), data, store, me, deadline=time.monotonic() - 1.0)
    assert uci_splits.run(experiment(), data, store, me, [1])
    assert uci_splits.run(experiment(), data, store, me)
    assert uci_splits.run(experiment(), data, store, me)
    assert asked == [[1], [0, 2]]
    rows = store.rows()
    assert [(row.key.replica, row.status) for row in rows] == [(0, "done"), (1, "done"), (2, "done")]
    assert rows[0].provenance["source"] == data.source
    assert rows[0].protocol.settings["kind"] == "dropconnect++"


def test_an_ensemble_takes_what_plain_networks_chose(data: RegressionSet, store: Store) -> None:
    me = Owner.here()
    assert uci.plain_choices(experiment("ensemble"), store, [0]) is None
    settings = experiment("plain").settings
    assert Regression(data="uci:yacht", kind="plain", training=SHORT, settings=settings) == experiment("plain")
    uci_splits.run(experiment("plain"), data, store, me, [0])
    row = store.rows()[0].results
    assert uci.plain_choices(experiment("ensemble"), store, [0]) == [Setting(row["rate"], row["precision"])]


def test_what_is_interrupted_holds_no_work(data: RegressionSet, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(uci, "measure", stopped)
    with pytest.raises(KeyboardInterrupt):
        uci_splits.run(experiment(), data, store, Owner.here())
    assert store.rows() == []
    assert not store.holders()


def test_a_diverged_split_is_stored_as_such(data: RegressionSet, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    found = uci.measure(experiment(), data, [0])[0]
    monkeypatch.setattr(uci, "measure", lambda *_: [found | {"rmse": float("nan")}])
    assert uci_splits.run(experiment(), data, store, Owner.here(), [0])
    assert store.rows()[0].status == "diverged"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "dropout"}, "kind must be one of plain, mc-dropout"),
        ({"root_seed": -1}, r"root_seed must lie in"),
        ({"settings": (Setting(1.0, 1.0),)}, "dropconnect\\+\\+ has no setting"),
        ({"kind": "plain", "settings": (Setting(0.1, 1.0),)}, "plain has no setting"),
        ({"factors": (0.0,)}, "factors must be above 0"),
    ],
)
def test_settings_are_checked(change: dict, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        replace(experiment(), **change)
    with pytest.raises(ProtocolError, match="folds must be at most 5"):
        replace(SHORT, folds=6)


def test_a_digest_is_of_every_setting() -> None:
    one = experiment()
    others = [
        replace(one, root_seed=1),
        replace(one, factors=(1.0,)),
        replace(one, settings=NOISY),
        replace(one, training=replace(SHORT, steps=41)),
        replace(one, kind="dropconnect"),
    ]
    assert len({one.digest, *(other.digest for other in others)}) == 6


def test_workers_take_splits_and_ensembles_wait_for_what_plain_networks_choose(
    data: RegressionSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uci_splits, "SPLITS_AT_ONCE", 1)
    plans = [uci_splits.Plan(experiment(kind), data, range(SPLITS)) for kind in ("plain", "ensemble")]
    found = []
    for name in ("one", "two"):
        out = tmp_path / name
        out.mkdir()
        workers = host(out) if name == "two" else None
        with Store.open(out / "results.sqlite") as store:
            assert uci_splits.run_all(plans, store, Owner.here(), engine=workers)
            found.append([(row.key, row.status, row.results, row.versions) for row in store.rows()])
        if workers is not None:
            workers.close()
    assert found[0] == found[1]
    assert len(found[0]) == 2 * SPLITS

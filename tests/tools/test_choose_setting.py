"""The rule that chooses what goes to the test set: what it chose then, and what it takes into account."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dropconnectpp.lab.config import experiments, protocol
from dropconnectpp.lab.config.method import Method
from dropconnectpp.lab.runs.owner import Owner
from dropconnectpp.lab.runs.store import Store
from scripts import ROOT, call

SEARCHED = [
    f"records/{name}.jsonl.xz" for name in ("connectivity/search", "connectivity/lighter_search", "noise/search")
]
"""All searches on held-out data that were recorded."""
LIGHTER = "DropConnect++ (estimator=local, hyper=optimal, alpha=2.0, beta=8.0, logit_step=100.0, kl_weight=8.0)"


@pytest.mark.parametrize(
    ("searches", "below", "ran"),
    [
        (["lighter_search"], [0.005], {"cifar10": "lighter", "fashion-mnist": "lighter_fashion"}),
        (["price_search", "price_search_fashion"], [0.005, 0.01], {"fashion-mnist": "price_chosen_fashion"}),
    ],
)
def test_the_setting_that_went_to_the_test_sets_is_the_one_that_the_rule_chooses(
    tmp_path: Path, searches, below, ran
) -> None:
    options = ["--searches", *(f"experiments/search/{name}.toml" for name in searches)]
    options += ["--below", *(f"DropConnect, rate 0.7, step size {step}" for step in below)]
    options += [word for name in ran for word in ("--write", name, str(tmp_path / f"{name}.toml"))]
    found = call("tools/choose_setting.py", *SEARCHED, *options)
    assert found.returncode == 0, found.stderr[-2000:]
    assert found.stdout.splitlines()[-1] == f"chosen: {LIGHTER}"
    for name, file in ran.items():
        expected = experiments.from_file(ROOT / "experiments" / "paper" / f"{file}.toml")
        assert experiments.from_file(tmp_path / f"{name}.toml") == expected


SEARCH = """
repeats = 2

[protocol]
data = "{data}"

[protocol.training]
step_size = {steps}
holdout = 10

[[methods]]
alpha = [1, 2, 3, 4]

[[methods]]
logit_step = 1e-9
"""


Rows = list[tuple[protocol.Protocol, float, float]]


def store_of(path: Path, rows: Rows) -> Path:
    """Two networks of each protocol, with an accuracy, which the second exceeds by one, and an NLL."""
    me = Owner.here()
    with Store.open(path) as store:
        for one, accuracy, nll in rows:
            for key in store.claim([(store.add(one), replica) for replica in range(2)], me):
                results = {"accuracy": accuracy + key.replica, "nll": nll}
                store.finish(key, me, "done", results=results, seconds=1.0, device="none")
    return path


def test_choose_setting_by_accuracy_over_all_searches_among_those_with_a_low_nll(tmp_path: Path) -> None:
    accuracies = {"cifar10": [60.0, 71.0, 90.0, 75.0, 99.0], "svhn": [60.0, 79.0, 90.0, 70.0, 99.0]}
    likelihoods = {"cifar10": [0.4, 0.4, 0.6, 0.4, 0.4], "svhn": [9.0] * 5}  # svhn has no limit
    rows: Rows = []
    files, other = [], Method(kind="dropconnect", rate=0.5)
    for name in accuracies:
        files.append(tmp_path / f"{name}.toml")
        files[-1].write_text(SEARCH.format(data=name, steps=0.01))
        tried = experiments.from_file(files[-1]).protocols
        rows += zip(tried, accuracies[name], likelihoods[name], strict=True)
        rows.append((replace(tried[0], method=other), 50.0, 0.5))
    options = (str(store_of(tmp_path / "results.sqlite", rows)), "--searches", *map(str, files))
    below = ("--below", "DropConnect, rate 0.5, step size 0.01")
    found = call("tools/choose_setting.py", *options, *below, "--write", "svhn", str(tmp_path / "chosen.toml"))
    assert found.returncode == 0, found.stderr[-2000:]
    assert found.stdout.splitlines()[-1] == "chosen: DropConnect++ (alpha=2.0)"
    (chosen,) = experiments.from_file(tmp_path / "chosen.toml").protocols
    assert chosen == protocol.paper("svhn", Method(alpha=2.0))
    unknown = call("tools/choose_setting.py", *options, "--below", "DropConnect")
    assert "0 settings on cifar10 are called 'DropConnect'; one is needed." in unknown.stderr
    assert "None has a lower NLL." in call("tools/choose_setting.py", *options, *below, below[1]).stderr
    twice = call("tools/choose_setting.py", *options, str(files[0]), *below)
    assert "Two searches have the same data." in twice.stderr
    assert "3 settings to be below, 2 searches." in call("tools/choose_setting.py", *options, *below, "x", "y").stderr
    files[0].write_text(SEARCH.format(data="cifar10", steps=0.01).replace("repeats = 2", "repeats = 3"))
    early = call("tools/choose_setting.py", *options, *below)
    assert "cifar10, DropConnect++: 2 of 3 networks." in early.stderr


def test_choose_setting_takes_the_best_step_size_whose_nll_is_low(tmp_path: Path) -> None:
    # Two step sizes of each method; the most accurate of all has too high an NLL, the next at one step size has.
    accuracies = [60, 61, 70, 72, 80, 79, 95, 96, 99, 99]
    likelihoods = [0.4, 0.4, 0.4, 0.4, 0.6, 0.4, 0.6, 0.6, 0.4, 0.4]
    search = tmp_path / "search.toml"
    search.write_text(SEARCH.format(data="cifar10", steps=[0.005, 0.01]))
    tried = experiments.from_file(search).protocols
    rows: Rows = [*zip(tried, map(float, accuracies), likelihoods, strict=True)]
    rows.append((replace(tried[0], method=Method(kind="dropconnect", rate=0.5)), 50.0, 0.5))
    store = store_of(tmp_path / "results.sqlite", rows)
    written = [tmp_path / f"{name}.toml" for name in ("cifar10", "svhn")]
    found = call(
        "tools/choose_setting.py",
        *(str(store), "--searches", str(search), "--below", "DropConnect, rate 0.5, step size 0.005"),
        *("--write", "cifar10", str(written[0]), "--write", "svhn", str(written[1])),
    )
    assert found.returncode == 0, found.stderr[-2000:]
    assert found.stdout.splitlines()[1:] == [
        "DropConnect++ (alpha=3.0): accuracy 79.50% (79.50%, NLL 0.4000, step size 0.01)",
        "DropConnect++ (alpha=2.0): accuracy 72.50% (72.50%, NLL 0.4000, step size 0.01)",
        "DropConnect++: accuracy 61.50% (61.50%, NLL 0.4000, step size 0.01)",
        "DropConnect++ (alpha=4.0): out (NLL not below)",
        "chosen: DropConnect++ (alpha=3.0)",
    ]
    steps = [experiments.from_file(path).protocols[0].training.step_size for path in written]
    assert steps == [0.01, None]

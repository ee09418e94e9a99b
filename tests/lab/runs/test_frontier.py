"""Which setting goes to the test set, and a whole search on tiny networks: trials, choices, controls, going on."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dropconnectpp.lab import data
from dropconnectpp.lab.config.experiments import Experiment, from_file
from dropconnectpp.lab.config.notes import SPARSITY
from dropconnectpp.lab.config.protocol import Protocol
from dropconnectpp.lab.config.pruning import FixedSupport, Plan, SparseVD
from dropconnectpp.lab.config.selection import SparsitySearch
from dropconnectpp.lab.config.sparsity import protocol_for
from dropconnectpp.lab.report import text, verdicts
from dropconnectpp.lab.runs import frontier, rows
from dropconnectpp.lab.runs.frontier import Trial, choose
from dropconnectpp.lab.runs.runner import Runner
from dropconnectpp.lab.runs.store import Store
from dropconnectpp.lab.runs.tasks import StackTask
from scripts import ROOT

SEARCH = SparsitySearch(keep=(0.02,))
FILE = """
repeats = 2

[sparsity]
keep = [0.3, 0.2]
repeats = 1
holdout_share = 0.2
controls = ["random", "unlearned", "from-start"]

[protocol]
data = "fashion-mini"

[[protocol.architecture.layers]]
kind = "dense"
units = 6
gated = true

[[protocol.architecture.layers]]
kind = "activation"

[[protocol.architecture.layers]]
kind = "dense"
gated = true

[protocol.training]
optimiser = "adam"
step_size = 0.003
schedule = "second-half"
batch_size = 200
epochs = 2

[protocol.evaluation]
every = 2
curve_samples = 0
samples = []
shares = []
predictive_samples = 0

[[methods]]
kind = "sparsity-plan"
beta = [99.0, 999.0]

[[methods]]
kind = "gradual-magnitude"
every = 5
step_size = [0.003, 0.01]

[[methods]]
kind = "none"
"""


def trial(share: float, error: float, nll: float = 0.1, **changes: Any) -> Trial:
    protocol = replace(protocol_for("mnist", "lenet-300-100"), pruning=SparseVD(kl_weight=1.0 + share))
    return replace(Trial(protocol, "digest", share, error, nll, 2, 0), **changes)


class TestTheRule:
    def test_the_lowest_error_of_those_that_keep_the_share(self):
        offered = [trial(0.03, 1.0), trial(0.02, 1.5), trial(0.012, 1.4), trial(0.001, 1.6)]
        assert choose(offered, 0.02, SEARCH) is offered[2]

    def test_to_within_a_tenth(self):
        assert choose([trial(0.0221, 1.0), trial(0.0219, 1.2)], 0.02, SEARCH) == trial(0.0219, 1.2)

    def test_of_equal_errors_the_lower_nll(self):
        assert choose([trial(0.02, 1.5, 0.3), trial(0.01, 1.5, 0.2)], 0.02, SEARCH) == trial(0.01, 1.5, 0.2)

    def test_a_setting_with_a_diverged_network_is_out(self):
        assert choose([trial(0.02, math.nan, diverged=1), trial(0.02, 9.0)], 0.02, SEARCH) == trial(0.02, 9.0)

    def test_none_where_none_keeps_so_few(self):
        assert choose([trial(0.03, 1.0)], 0.02, SEARCH) is None


def experiment(folder: Path) -> Experiment:
    (folder / "mine.toml").write_text(FILE)
    return from_file(folder / "mine.toml")


def runner(folder: Path, deadline: float | None = None) -> Runner:
    return Runner(folder / "out", torch.device("cpu"), data.load, deadline=deadline)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a whole search was run."""
    folder = tmp_path_factory.mktemp("frontier")
    assert frontier.train_frontier(experiment(folder), runner(folder))
    return folder


def notes(folder: Path) -> dict[str, Any]:
    with Store.open(folder / "out" / "results.sqlite", read_only=True) as store:
        return {name.removeprefix(SPARSITY): note for (_, name), note in store.notes().items() if SPARSITY in name}


def test_every_method_and_share_has_a_choice_among_as_many_settings(trained: Path) -> None:
    found = notes(trained)
    methods = ("DropConnect++", "Gradual magnitude pruning")
    assert {f"{keep} {name}" for keep in (0.3, 0.2) for name in methods} | {"1 Dense"} <= found.keys()
    for name in methods:
        note = found[f"0.2 {name}"]
        assert len(note["trials"]) == 2
        (chosen,) = [one for one in note["trials"] if one["chosen"]]
        reached = [one for one in note["trials"] if one["reached"]]
        assert chosen["error"] == min(one["error"] for one in reached)
    settings = [one["setting"] for one in found["0.2 Gradual magnitude pruning"]["trials"]]
    assert settings == ["step size 0.003", "step size 0.01"]


def test_trials_never_see_the_test_set_and_finals_see_all_training_images(trained: Path) -> None:
    tried = {one["digest"] for note in notes(trained).values() for one in note["trials"]}
    with Store.open(trained / "out" / "results.sqlite", read_only=True) as store:
        for row in store.rows():
            holdout = row.protocol.settings["training"]["holdout"]
            assert holdout == (1200 if row.key.digest in tried else 0)
            assert row.status == "done"
            assert row.results["weights"] == 1024 * 6 + 60


def test_what_is_chosen_keeps_its_share(trained: Path) -> None:
    with Store.open(trained / "out" / "results.sqlite", read_only=True) as store:
        for name in ("DropConnect++", "Gradual magnitude pruning"):
            for row in store.rows(notes(trained)[f"0.2 {name}"]["resolved"]):
                share = row.results["weights_kept"] / row.results["weights"]
                assert share == pytest.approx(0.2, rel=0.25 if name == "DropConnect++" else 0.01)


def test_shares_are_of_the_weights_with_gates(tmp_path: Path) -> None:
    """A share of the whole network would never be reached where most weights have no gates."""
    file = FILE.replace('kind = "dense"\ngated = true', 'kind = "dense"').replace("keep = [0.3, 0.2]", "keep = [0.2]")
    (tmp_path / "mine.toml").write_text(file)
    assert frontier.train_frontier(from_file(tmp_path / "mine.toml"), runner(tmp_path))
    found = notes(tmp_path)
    gradual = found["0.2 Gradual magnitude pruning"]
    assert [one["share"] for one in gradual["trials"]] == pytest.approx([0.2, 0.2], abs=1e-3)
    with Store.open(tmp_path / "out" / "results.sqlite", read_only=True) as store:
        for row in store.rows(gradual["resolved"]):
            assert rows.share_kept(row.results) == pytest.approx(0.2, abs=1e-3)
            assert [one.get("gated", True) for one in row.results["layers"]] == [True, False]
        shares = {one.digest: one.settings for one in store.protocols()}[found["0.2 Random from the start"]["resolved"]]
        assert len(shares["pruning"]["shares"]) == 1
    assert "Kept is the share of the 6,144 weights with gates" in text(
        tmp_path / "out" / "results.sqlite", ["connections"]
    )


def test_what_survives_is_counted_of_finals_alone(trained: Path) -> None:
    with Store.open(trained / "out" / "results.sqlite", read_only=True) as store:
        for row in store.rows():
            final = not row.protocol.settings["training"]["holdout"]
            assert "deployed" not in row.results, "sizes are of networks without whole units"
            for layer in row.results["layers"]:
                counted = {name: layer[name] for name in ("by_place", "by_map", "by_unit") if name in layer}
                assert len(counted) == (3 if final and layer["kept"] < layer["weights"] else 0)
                assert all(sum(counts) == layer["kept"] for counts in counted.values())


def test_networks_without_whole_inputs_are_measured_as_deployed(tmp_path: Path) -> None:
    start, end = FILE.index("[[methods]]"), FILE.index('[[methods]]\nkind = "none"')
    groups = '[[methods]]\nkind = "sparsity-plan"\ngranularity = "input"\nlogit_lr = 0.3\n\n'
    file = (FILE[:start] + groups + FILE[end:]).replace("keep = [0.3, 0.2]", "keep = [0.3]").replace("controls", "# ")
    (tmp_path / "mine.toml").write_text(file.replace("epochs = 2", "epochs = 4"))
    assert frontier.train_frontier(from_file(tmp_path / "mine.toml"), runner(tmp_path))
    digest = notes(tmp_path)["0.3 DropConnect++, whole units"]["resolved"]
    with Store.open(tmp_path / "out" / "results.sqlite", read_only=True) as store:
        for row in store.rows(digest):
            before, after = row.results["deployed"]["bytes"]
            assert after < before


def test_controls_are_those_of_what_was_chosen(trained: Path) -> None:
    found = notes(trained)
    with Store.open(trained / "out" / "results.sqlite", read_only=True) as store:
        settings = {one.digest: one.settings for one in store.protocols()}
        ours = settings[found["0.2 DropConnect++"]["resolved"]]["pruning"]
        drawn = settings[found["0.2 Support at random"]["resolved"]]["pruning"]
        assert drawn == ours | {"support": "random"}
        start = settings[found["0.2 Random from the start"]["resolved"]]["pruning"]["shares"]
        rows = store.rows(found["0.2 DropConnect++"]["resolved"])
        for share, layer in zip(start, zip(*(row.results["layers"] for row in rows), strict=True), strict=True):
            assert share == pytest.approx(sum(one["kept"] / one["weights"] for one in layer) / 2, rel=1e-5)


def test_the_report_shows_it(trained: Path) -> None:
    shown = text(trained / "out" / "results.sqlite", ["connections", "connections_tests"])
    assert "fashion-mini, layers of your own: 20% of the weights" in shown
    assert "Controls at 20%:" in shown
    assert verdicts.BETTER in shown or verdicts.EQUAL in shown or verdicts.WORSE in shown


def test_it_goes_on_where_it_was_stopped(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is trained twice, and stopped before anything it says so."""
    monkeypatch.setattr(StackTask, "run", lambda *_: pytest.fail("all of this is finished"))
    assert frontier.train_frontier(experiment(trained), runner(trained))
    monkeypatch.undo()
    assert not frontier.train_frontier(experiment(tmp_path), runner(tmp_path, deadline=0.0))


def test_unequal_budgets_are_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(FILE.replace("step_size = [0.003, 0.01]", ""))
    with pytest.raises(ValueError, match=r"as many settings at a share; there are of DropConnect\+\+ 2, Gradual"):
        from_file(tmp_path / "mine.toml")


def test_controls_take_the_settings_of_the_plan() -> None:
    plan = Plan(keep=0.02, noise=0.05, beta=999.0)
    base: Protocol = replace(protocol_for("mnist", "lenet-300-100"), pruning=plan)
    found = frontier.controls_of(base, ("magnitude", "unlearned", "from-start"), (0.01, 0.1, 0.5))
    assert found["magnitude"].pruning == replace(plan, support="magnitude")
    assert found["unlearned"].pruning == Plan(keep=0.02, noise=0.05, learning=False)
    assert found["from-start"].pruning == FixedSupport(shares=(0.01, 0.1, 0.5), noise="dropconnect", rate=0.05)


def test_what_was_chosen_is_published(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    tool: Any = __import__("publish")
    store = trained / "out" / "results.sqlite"
    wanted = {"tables": ["connections", "tried"]}
    files = tool.publish(store, tmp_path, "tiny", {"mine.toml": experiment(trained)}, **wanted)
    assert [path.name for path in files] == ["tiny_rows.csv.gz", "tiny_connections.md", "tiny_tried.md"]
    shown = (tmp_path / "tiny_connections.md").read_text()
    assert "missing" not in shown
    for name in ("Dense", "DropConnect++", "Gradual magnitude pruning", "Support at random", "Random from the start"):
        assert f"| {name} |" in shown
    without = replace(experiment(trained), sparsity=SparsitySearch(keep=(0.3, 0.2), repeats=1))
    tool.publish(store, tmp_path, "less", {"mine.toml": without}, **wanted)
    assert "Support at random" not in (tmp_path / "less_connections.md").read_text()

"""`dcpp run uncertainty` and `small-data` as a user types them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cli_cases import rows

from dropconnectpp.lab.config import small_data, uncertainty
from dropconnectpp.lab.config.small_data import given

COMMON = ("--dataset", "tiny", "--epochs", "1", "--step-size", "0.01", "--methods", "none,dropconnect", "--rate", "0.5")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few draws and steps."""
    monkeypatch.setattr(uncertainty, "JUDGED", replace(uncertainty.JUDGED, predictive_samples=2))
    monkeypatch.setattr(small_data, "given", lambda examples: replace(given(examples), least_steps=2))


def test_it_judges_networks_and_ensembles_against_foreign_images(dcpp) -> None:
    code, output, errors = dcpp("run", "uncertainty", *COMMON, "--repeats", "5", "--foreign", "other")
    assert code == 0, errors
    for text in (
        "How good are the probabilities on the test set?",
        "2 networks",
        "Ensemble of 5, DropConnect",
        "Are foreign images told from the test set",
        "other",
    ):
        assert text in output
    labels = [row.protocol.label for row in rows()]
    assert {label: labels.count(label) for label in labels} == {
        "No regularization": 5,
        "DropConnect": 5,
        "Ensemble of 5": 1,
        "Ensemble of 5, DropConnect": 1,
    }
    assert '<section id="probabilities">' in Path("dcpp-results/index.html").read_text()
    before = {row.key: row.finished for row in rows()}
    assert dcpp("run", "uncertainty", *COMMON, "--repeats", "5", "--foreign", "other")[0] == 0
    assert before == {row.key: row.finished for row in rows()}


def test_few_networks_are_judged_without_ensembles(dcpp) -> None:
    code, output, errors = dcpp("run", "uncertainty", *COMMON, "--repeats", "2")
    assert code == 0, errors
    assert "Ensemble of" not in output
    assert "foreign" not in output


def test_small_data_has_a_line_for_each_number_of_examples(dcpp) -> None:
    command = ("run", "small-data", *COMMON, "--repeats", "2", "--examples", "128,140,all")
    code, output, errors = dcpp(*command)
    assert code == 0, errors
    for size in ("128", "140", "all"):
        assert f"tiny †, {size} training examples" in output
    assert len(rows()) == 2 * 3 * 2
    assert '<section id="small_data">' in Path("dcpp-results/index.html").read_text()
    assert dcpp("run", "uncertainty", *COMMON, "--repeats", "2")[0] == 0
    assert len(rows()) == 2 * 3 * 2  # the networks with all examples are the same


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("table1", "--examples", "250"), "--examples is not for table1. It is for dcpp run small-data."),
        (("small-data", *COMMON, "--examples", "many"), "examples must be whole numbers separated by commas, or all"),
        (("small-data", *COMMON, "--examples", "50"), "or at least a batch of 128, got 50."),
        (("uncertainty", "--hyper", "optimal"), "--hyper is not for uncertainty. It compares methods as they are"),
        (("uncertainty", *COMMON, "--foreign", "large"), "foreign images must be as large as those of tiny"),
    ],
)
def test_mistakes_are_told_before_anything_is_written(dcpp, arguments, message) -> None:
    code, _, errors = dcpp("run", *arguments)
    assert code == 1
    assert message in errors
    assert not Path("dcpp-results").exists()


def test_help_teaches(dcpp) -> None:
    _, shown, _ = dcpp("run", "--help")
    for part in ("uncertainty judges probabilities by one pass", "small-data does so with few", "--examples"):
        assert part in " ".join(shown.split())


def test_with_few_examples_step_sizes_are_chosen_on_held_out_data() -> None:
    few = uncertainty.uncertainty("fashion-mnist", fewer=given("250,all"))
    assert few.selection.together
    assert not uncertainty.uncertainty("fashion-mnist", fewer=given("250"), step_size=0.01).selection.together
    whole = uncertainty.uncertainty("fashion-mnist")
    assert not whole.selection.together
    assert {p.digest for p in whole.protocols} < {p.digest for p in few.protocols}
    assert {p.evaluation.foreign for p in few.protocols} == {"mnist"}
    assert uncertainty.uncertainty("cifar10").protocols[0].evaluation.corruptions

"""Every family of models: converts, trains, saves, exports, and agrees with the model that has its gates folded in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import outcomes
import pytest
from outcome_cases import CASES, Case, both, hidden, sequences, words
from torch import nn

import dropconnectpp as dcpp

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
Record = Callable[[str, str, str, str], None]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def converted(case: Case) -> nn.Module:
    return dcpp.convert(case.model(), preset="sparse", example_input=case.inputs())


@each_case
def test_a_model_converts(case: Case, record: Record) -> None:
    """A pass under random masks is that of the folded model: no gate is ignored."""
    weights = sum(p.numel() for p in case.model().parameters() if p.ndim > 1)
    learned = dcpp.posterior(converted(case))
    share = sum(layer.weight.keep_probability.numel() for layer in learned.layers.values()) / weights
    assert share > 0.2, "embeddings may be left out"
    outcomes.settle(
        record, "model", case.name, "converts", outcomes.YES if share > 0.5 else f"in part: {share:.0%} of the weights"
    )


@each_case
def test_a_model_trains(case: Case, record: Record) -> None:
    outcome = outcomes.trains(converted(case), case.inputs())
    outcomes.settle(record, "model", case.name, "trains", outcome)


@each_case
def test_a_model_is_saved(case: Case, record: Record, tmp_path: Path) -> None:
    model = dcpp.prune(converted(case), keep=0.5)
    outcome = outcomes.refused(lambda: outcomes.saves(model, case.model(), case.inputs(), tmp_path))
    outcomes.settle(record, "model", case.name, "saves", outcome)


@each_case
def test_a_model_agrees_with_its_dense_one(case: Case, record: Record) -> None:
    outcome = outcomes.agrees(dcpp.prune(converted(case), keep=0.5), case.inputs())
    outcomes.settle(record, "model", case.name, "to_dense", outcome)


@each_case
def test_a_model_is_exported(case: Case, record: Record) -> None:
    outcome = outcomes.exports(converted(case), case.inputs())
    outcomes.settle(record, "model", case.name, "torch.export", outcome)


@each_case
def test_a_model_becomes_onnx(case: Case, record: Record, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    long = case.batch in (words, both, hidden, sequences)
    outcome = outcomes.refused(lambda: outcomes.to_onnx(converted(case), case.inputs(), tmp_path, long))
    outcomes.settle(record, "model", case.name, "ONNX", outcome)

"""What the report says of times: a difference only where the rounds exclude chance."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report_cases import fill_set
from scipy import stats

from dropconnectpp.lab.report import sentences, text_tables
from dropconnectpp.lab.runs.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "results.sqlite") as opened:
        yield opened


@pytest.mark.parametrize(
    ("folded", "noise", "verdict"),
    [
        (0.0102, 0.0, "yes: "),
        (0.0102, 0.3, "yes: "),
        (0.0090, 0.02, "yes, cheaper: "),
        (0.0090, 0.3, "not distinguishable: "),
        (0.0120, 0.02, "no, more expensive: "),
        (0.0120, 0.5, "not distinguishable: "),
        (0.0120, None, "not tested, since no spread is stored: "),
        (None, 0.02, "no, more expensive: "),
    ],
)
@pytest.mark.parametrize("together", [True, False])
def test_the_question_of_cost_is_answered_where_the_spread_excludes_chance(
    store: Store, folded: float | None, noise: float | None, verdict: str, together: bool
) -> None:
    digests = fill_set(store, kinds=["dropout", "dropconnect++"])
    common: dict[str, Any] = {"replicas": 5, "device": "Some GPU"}

    def rounds(place: int, **medians: float | None) -> dict[str, Any]:
        around = (-1.0, 1.0, 0.0, 0.5, -0.5) if place else (0.5, -0.5, 1.0, 0.0, -1.0)
        known = {name: one for name, one in medians.items() if one is not None}
        each = {name: [one * (1.0 + (noise or 0.0) * a) for a in around] for name, one in known.items()}
        return {} if noise is None else {"rounds": each, "session": "1" if together else str(place)}

    timings = {"seconds_per_epoch": 2.0, "prediction": {"dropout": 0.01}, **rounds(0, epoch=2.0, dropout=0.01)}
    store.write_note(digests[0], "timings", timings | common)
    prediction = {"mean": 0.015, "folded": folded, "mc30": 0.3}
    timings = {"seconds_per_epoch": 3.0, "prediction": prediction, **rounds(1, epoch=3.0, mean=0.015, folded=folded)}
    store.write_note(digests[1], "timings", timings | common)
    text = text_tables(store.rows(), store.notes(), store.protocols(), ["prediction"])
    (line,) = re.findall(
        r"Is DropConnect\+\+ as cheap as Dropout\? (.*?)\s*(?:The paper says|$)", " ".join(text.split())
    )
    way = "By Eq. (19)" if folded is None else "Folded into a plain network"
    assert line.startswith(f"{way}, {verdict}10,000 predictions take ")
    assert f"{(folded or 0.015) / 0.01:.2f} times Dropout's 0.0100 s" in line
    assert "Eq. (18) with 30 samples takes 30.00 times as long." in line
    if noise:
        assert re.search(r"Dropout's 0\.0100 s \(95% interval [\d.]+ to [\d.]+, 5 rounds\)\.", line)
        assert re.search(r"1\.50 times as long \(95% interval [\d.]+ to [\d.]+, 5 rounds; the paper: 1\.11\)\.$", line)
    else:
        assert line.endswith("Training takes 1.50 times as long (the paper: 1.11).")


def test_a_ratio_of_times_is_that_of_pairs_where_they_were_timed_together() -> None:
    a, b = [1.0, 1.2, 1.1, 1.3], [2.0, 2.5, 2.1, 2.8]
    row, other = {"session": "x", "rounds": {"folded": a}}, {"session": "x", "rounds": {"dropout": b}}
    found = sentences.ratio_of_rounds(row, other, "folded", "dropout")
    expected = stats.ttest_rel([math.log(one) for one in a], [math.log(one) for one in b])
    assert found is not None
    assert found.p == pytest.approx(expected.pvalue)
    found = sentences.ratio_of_rounds(row, other | {"session": "y"}, "folded", "dropout")
    expected = stats.ttest_ind([math.log(one) for one in a], [math.log(one) for one in b], equal_var=False)
    assert found is not None
    assert found.p == pytest.approx(expected.pvalue)
    assert sentences.ratio_of_rounds(row, {"session": "x"}, "folded", "dropout") is None


def test_cost_on_other_devices_is_not_compared(store: Store) -> None:
    digests = fill_set(store, kinds=["dropout", "dropconnect++"])
    for digest, rule, device in zip(digests, ("dropout", "mean"), ("one", "two"), strict=True):
        store.write_note(digest, "timings", {"prediction": {rule: 0.01}, "device": device})
    text = " ".join(text_tables(store.rows(), store.notes(), store.protocols()).split())
    assert "Not measured: there are no timings of Dropout's predictions on the same device." in text

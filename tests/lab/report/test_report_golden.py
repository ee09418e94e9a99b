"""A store of 320 networks made by rule, its tables as they must look, and its statistics against scipy.

Write the golden tables anew, after a change that is meant, with: python tests/lab/report/test_report_golden.py
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import pytest
from report_cases import chosen, fill, result
from scipy import stats

from dropconnectpp.lab.report import build, paper_values, report_tables
from dropconnectpp.lab.runs.store import Store

GOLDEN = Path(__file__).parent / "golden" / "report_tables.md"
REPLICAS = 20
TIMINGS = {
    "none": {"none": 0.0201},
    "dropout": {"dropout": 0.0202},
    "dropconnect": {"mean": 0.0243, "folded": 0.0204, "mc30": 0.617},
    "dropconnect++": {"mean": 0.0251, "folded": 0.0205, "mc30": 0.631},
}


def accuracies(data: str, kind: str) -> list[float]:
    """Around the paper's mean, by a generator whose numbers never change."""
    random = Random(f"{data} {kind}")
    noise = [sum(random.random() for _ in range(12)) - 6.0 for _ in range(REPLICAS)]
    return [round(paper_values.ACCURACY[data][kind] + 0.3 * one, 2) for one in noise]


def lost(data: str, kind: str, replica: int) -> bool:
    """Two replicas diverged."""
    return (data, kind) == ("svhn", "dropconnect") and replica in (3, 4)


def kept(data: str, kind: str) -> dict[int, float]:
    """What a table may average."""
    return {r: value for r, value in enumerate(accuracies(data, kind)) if not lost(data, kind, r)}


def fill_golden(store: Store) -> None:
    for data in paper_values.TITLES:
        for kind in paper_values.KINDS:
            found: dict[int, dict[str, Any]] = {}
            for replica, accuracy in enumerate(accuracies(data, kind)):
                diverged = {"diverged_at": 5, "losses": [], "curve": []}
                found[replica] = diverged if lost(data, kind, replica) else result(accuracy, kind, replica)
                for item in found[replica].get("mc", ()):
                    item["accuracy"] += 0.05 * (replica % 3)
            evidence = {} if data != "norb" else {"provenance": {"source": "a mirror", "verified": False}}
            gone = [r for r in found if lost(data, kind, r)]
            digest = fill(store, chosen(data, kind), found, diverged=gone, **evidence)
            seconds = paper_values.SECONDS[data][kind] / 10.0
            timings = {"seconds_per_epoch": seconds, "replicas": 20, "device": "A GPU", "prediction": TIMINGS[kind]}
            store.write_note(digest, "timings", timings)


def golden_tables(folder: Path) -> tuple[str, dict[str, list[dict[str, Any]]]]:
    with Store.open(folder / "results.sqlite") as store:
        fill_golden(store)
        found = report_tables(store.rows(), store.notes(), store.protocols())
    build(folder / "results.sqlite", folder, figures=False)
    return (folder / "tables.md").read_text(encoding="utf-8"), found


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, list[dict[str, Any]]]]:
    return golden_tables(tmp_path_factory.mktemp("golden"))


def test_tables_are_as_they_were(tables: tuple[str, Any]) -> None:
    assert tables[0] == GOLDEN.read_text(encoding="utf-8")


def test_means_and_intervals_are_scipys(tables: tuple[str, Any]) -> None:
    rows = tables[1]["accuracy"]
    assert len(rows) == 16
    for row in rows:
        sample = list(kept(row["data"], row["kind"]).values())
        assert row["n"] == len(sample)
        assert row["mean"] == pytest.approx(stats.tmean(sample), rel=1e-12)
        assert row["standard_deviation"] == pytest.approx(stats.tstd(sample), rel=1e-9)
        ends = stats.t.interval(0.95, len(sample) - 1, loc=stats.tmean(sample), scale=stats.sem(sample))
        assert row["interval"] == pytest.approx(ends, rel=1e-12)


def test_tests_are_scipys(tables: tuple[str, Any]) -> None:
    rows = tables[1]["significance"]
    assert len(rows) == 12
    others = {"No regularization": "none", "Dropout": "dropout", "DropConnect": "dropconnect"}
    for row in rows:
        ours, other = kept(row["data"], "dropconnect++"), kept(row["data"], others[row["other"]])
        a, b = list(ours.values()), list(other.values())
        both = sorted(ours.keys() & other.keys())
        expected = {
            "student": stats.ttest_ind(a, b),
            "welch": stats.ttest_ind(a, b, equal_var=False),
            "paired": stats.ttest_rel([ours[r] for r in both], [other[r] for r in both]),
        }
        for name, test in expected.items():
            assert row[name]["t"] == pytest.approx(test.statistic, rel=1e-9)
            assert row[name]["p"] == pytest.approx(test.pvalue, rel=1e-7)
            ends = test.confidence_interval(0.95)
            assert row[name]["interval"] == pytest.approx((ends.low, ends.high), rel=1e-9)
        deviation = ((stats.tvar(a) + stats.tvar(b)) / 2) ** 0.5
        assert row["welch"]["effect_size"] == pytest.approx((stats.tmean(a) - stats.tmean(b)) / deviation, rel=1e-9)


def test_p_is_adjusted_over_the_pairs_of_one_data_set(tables: tuple[str, Any]) -> None:
    for data in paper_values.TITLES:
        rows = [row for row in tables[1]["significance"] if row["data"] == data]
        for name in ("student", "welch", "paired"):
            found = sorted((row[name]["p"], row[name]["adjusted_p"]) for row in rows)
            steps = [min(1.0, p * factor) for (p, _), factor in zip(found, (3, 2, 1), strict=True)]
            assert [adjusted for _, adjusted in found] == pytest.approx([max(steps[: i + 1]) for i in range(3)])


def test_shown_cells_are_the_rounded_numbers(tables: tuple[str, Any]) -> None:
    """Table 1 is read back from the Markdown."""
    text, found = tables
    part = text.split("by one pass: Eq. (19)")[1].split("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in part.splitlines() if re.match(r"\| (No|Drop)", line)]
    assert len(lines) == 16
    for cells, row in zip(lines, found["accuracy"], strict=True):
        mean = f"{row['mean']:.2f}"
        assert cells[:2] == [row["method"], f"**{mean}**" if row["best"] else mean]
        assert cells[2] == "{:.2f} to {:.2f}".format(*row["interval"])
        assert cells[3:6] == [f"{row['standard_deviation']:.2f}", str(row["n"]), f"{row['paper']:.2f}"]
        assert float(cells[6]) == pytest.approx(row["mean"] - row["paper"], abs=0.006)
    assert sum(row["best"] for row in found["accuracy"]) == part.count("**7") + part.count("**4") + part.count("**9")


def test_a_case_by_hand() -> None:
    """1, 2, 3 against 4, 5, 6: means 2 and 5, variances 1, so t = -3 / sqrt(2 / 3) with 4 degrees, and d = -3."""
    with tempfile.TemporaryDirectory() as folder, Store.open(Path(folder) / "results.sqlite") as store:
        for kind, values in {"dropconnect++": (1.0, 2.0, 3.0), "dropout": (4.0, 5.0, 6.0)}.items():
            fill(store, chosen("cifar10", kind), {r: {"accuracy": value} for r, value in enumerate(values)})
        found = report_tables(store.rows(), store.notes())
    (pair,) = found["significance"]
    for name in ("student", "welch"):
        assert pair[name]["t"] == pytest.approx(-3.0 / (2.0 / 3.0) ** 0.5)
        assert pair[name]["degrees_of_freedom"] == pytest.approx(4.0)
        assert pair[name]["effect_size"] == pytest.approx(-3.0)
        assert pair[name]["p"] == pytest.approx(0.021312, abs=1e-6)  # a table of Student's t
        assert pair[name]["adjusted_p"] == pair[name]["p"]  # one pair: nothing to adjust
    assert pair["paired"] is None  # every difference is -3: no spread
    assert pair["sentence"].startswith("Dropout beats DropConnect++ by 3.00 points, 95% interval 0.73 to 5.27")
    line = next(row for row in found["accuracy"] if row["kind"] == "dropout")
    assert line["interval"] == pytest.approx((5.0 - 4.302653 / 3.0**0.5, 5.0 + 4.302653 / 3.0**0.5), abs=1e-6)
    assert [row["best"] for row in found["accuracy"]] == [True, False]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(golden_tables(Path(place))[0], encoding="utf-8")

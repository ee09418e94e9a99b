"""What the demo says of results in which ours wins, loses, ties or was not measured, and of notes of any content."""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import pytest
from demo_cases import KEEP, SIDE, note
from report_cases import Checker, chosen, fill, result
from scipy import stats

from dropconnectpp.lab.config.notes import DEMO
from dropconnectpp.lab.report import building, report_tables
from dropconnectpp.lab.report.demo_lines import demo_lines
from dropconnectpp.lab.report.selection import Selected
from dropconnectpp.lab.report.tables.demo import GRADUAL, PLAN
from dropconnectpp.lab.runs.store import Store

FEW, KEPT, FOREIGN, DEPLOYED = range(4)


def lines(content: Any) -> tuple[str, ...]:
    return demo_lines(report_tables([], {("digest", DEMO): content}))


def rows_of(content: Any, name: str = "demo") -> list[dict[str, Any]]:
    return report_tables([], {("digest", DEMO): content})[name]


# -------------------------------------------------------------------------------- wins, losses and ties


def found(pattern: str, text: str) -> bool:
    """Whether a text has a pattern in which brackets are brackets, ~ is any number and … is anything."""
    escaped = re.escape(pattern).replace("\\~", r"[-+]?\d+\.\d+").replace("…", ".*")
    return re.search(escaped, text) is not None


def test_a_win_is_told_with_its_interval():
    text = lines(note(plan=dict.fromkeys(KEEP, 86.0), gradual=dict.fromkeys(KEEP, 80.0)))[FEW]
    assert text.startswith(
        "Few connections: with 1% of the weights, SparsityPlan classifies 86.0% of 1,500 test images"
    )
    assert found("(n = 4), 1.00 points ahead of the plain network (95% interval ~ to ~), which reaches 85.0%", text)
    assert found("gradual magnitude pruning it is ahead at 5% (+6.00, …) and at 1% (+6.00, …).", text)
    assert "behind" not in text


def test_a_loss_is_told_as_a_loss():
    text = lines(note(plan=dict.fromkeys(KEEP, 80.0), gradual=dict.fromkeys(KEEP, 83.0)))[FEW]
    assert found("5.00 points behind the plain network (95% interval ~ to ~), which reaches 85.0%", text)
    assert found("it is behind at 5% (-3.00, 95% interval ~ to ~) and at 1% (-3.00, ", text)
    assert "ahead" not in text


def test_where_there_is_no_gain_it_says_so():
    text = lines(note(plain=83.0, plan=dict.fromkeys(KEEP, 83.0), gradual=dict.fromkeys(KEEP, 83.0)))[FEW]
    assert found("not distinguishable from the plain network (0.00 points, 95% interval ~ to ~, adjusted p = 1)", text)
    assert found("it is not distinguishable at 5% (0.00, …) and at 1% (0.00, ", text)
    assert not re.search("ahead|behind", text)


def test_shares_with_different_outcomes_are_told_apart():
    text = lines(note(plan={0.05: 82.0, 0.01: 81.0}, gradual={0.05: 84.0, 0.01: 70.0}))[FEW]
    assert found("it is behind at 5% (-2.00, 95% interval ~ to ~) and ahead at 1% (+11.00, 95% interval ~ to ~).", text)


def test_an_interval_without_0_is_no_difference_where_the_adjusted_p_is_too_large():
    content = note(plan={0.05: 84.9, 0.01: 84.9}, gradual={0.05: 84.9, 0.01: 84.9})
    row = next(row for row in rows_of(content) if (row["kind"], row["asked"]) == (PLAN, 0.01))
    test = row["against_plain"]
    assert test["interval"][1] < 0.0
    assert test["p"] < 0.05 < test["adjusted_p"]
    assert "not distinguishable from the plain network" in lines(content)[FEW]


def test_a_share_that_was_missed_is_said():
    assert "with 1.3% (1% were asked for) of the weights" in lines(note(kept={0.01: 0.013}))[FEW]
    assert "with 1% of the weights" in lines(note(kept={0.01: 0.0105}))[FEW]


def test_one_network_of_each_is_not_tested():
    content = note()
    content["networks"] = [one for one in content["networks"] if one["seed"] == 0]
    text = lines(content)
    assert "(n = 1), not tested against the plain network, which reaches" in text[FEW]
    assert text[FEW].endswith("Beside gradual magnitude pruning it is not tested at 5% and at 1%.")
    assert text[DEPLOYED].endswith("Speed was not tested: that needs two networks.")


def test_what_is_kept_is_described_and_not_compared():
    text = lines(note())[KEPT]
    assert text == (
        "What was kept: 12 of 16 pixels still have a connection; after gradual magnitude pruning, 12. "
        "The page shows which."
    )


@pytest.mark.parametrize(
    ("auroc", "said"),
    [
        ((0.90, 0.95), "an AUROC of 0.950, 0.050 ahead of the plain network (95% interval ~ to ~), which has 0.900"),
        ((0.95, 0.90), "an AUROC of 0.900, 0.050 behind the plain network (95% interval ~ to ~), which has 0.950"),
        ((0.90, 0.90), "an AUROC of 0.900, not distinguishable from the plain network (0.000, 95% interval ~ to ~, "),
    ],
)
def test_doubt_is_told_beside_that_of_a_plain_network(auroc, said):
    assert found(said, lines(note(auroc=auroc))[FOREIGN])


@pytest.mark.parametrize(
    ("posterior", "said"),
    [
        (88.0, "Its accuracy, 88.0%, is 3.00 points ahead of the other ("),
        (80.0, "Its accuracy, 80.0%, is 5.00 points behind the other ("),
        (85.0, "Its accuracy, 85.0%, is not distinguishable from the other ("),
    ],
)
def test_what_doubt_costs_in_accuracy_is_told(posterior, said):
    assert said in lines(note(posterior=posterior))[FOREIGN]


@pytest.mark.parametrize(
    ("ms", "said"),
    [
        (
            (10.0, 5.0),
            "It is faster: all test images take 5.00 ms instead of 10.0 (2.00 times as fast, 95% interval ~ to ~).",
        ),
        ((5.0, 10.0), "It is slower: all test images take 10.0 ms instead of 5.00 (0.500 times as fast, 95% interval "),
        (
            (5.0, 5.0),
            "In time it is not distinguishable from the plain network (1.00 times as fast, 95% interval ~ to ",
        ),
    ],
)
def test_speed_needs_a_spread_that_excludes_chance(ms, said):
    assert found(said, lines(note(ms=ms))[DEPLOYED])


def test_bytes_are_told():
    text = lines(note())[DEPLOYED]
    assert "make a file of 40 kB, where the plain network has 1,000 kB (25 times smaller)." in text


# --------------------------------------------------------------------------------------------- tables


def test_networks_are_compared_seed_by_seed_and_p_is_adjusted_over_the_table():
    content = note(plan={0.05: 84.5, 0.01: 83.2}, gradual={0.05: 84.0, 0.01: 83.0})
    rows = rows_of(content)
    accuracy = {
        (one["method"], one["keep"]): [o["accuracy"] for o in content["networks"] if (o["method"], o["keep"]) == key]
        for one in content["networks"]
        for key in [(one["method"], one["keep"])]
    }
    tests = []
    for row in rows:
        for name, other in (("against_plain", ("plain", 1.0)), ("against_gradual", (GRADUAL, row["asked"]))):
            if row[name] is None:
                continue
            expected = stats.ttest_rel(accuracy[row["kind"], row["asked"]], accuracy[other])
            assert row[name]["p"] == pytest.approx(expected.pvalue, rel=1e-7)
            ends = expected.confidence_interval(0.95)
            assert row[name]["interval"] == pytest.approx((ends.low, ends.high), rel=1e-7)
            tests.append((row[name]["p"], row[name]["adjusted_p"]))
    assert len(tests) == 6, "ours against both, gradual pruning against the plain network, at two shares"
    least = min(tests)
    assert least[1] == pytest.approx(min(1.0, 6 * least[0])), "Holm: the smallest p counts as often as there are tests"


def test_speed_is_the_paired_ratio_of_medians():
    content = note(ms=(10.0, 6.0))
    (row,) = rows_of(content, "demo_sizes")
    pairs = [one["compact"]["ms"] for one in content["networks"] if "compact" in one]
    before, after = ([pair[i] for pair in pairs] for i in (0, 1))
    logs = [math.log(a / b) for a, b in zip(before, after, strict=True)]
    expected = stats.ttest_1samp(logs, 0.0)
    assert row["speed"]["times"] == pytest.approx(math.exp(sum(logs) / len(logs)))
    assert row["speed"]["p"] == pytest.approx(expected.pvalue)


def test_each_pixel_is_averaged_over_networks():
    content = note()
    for one in content["networks"]:
        if one["method"] == PLAN and one["seed"] == 1:
            one["kept"]["pixels"][5] = 9
    found = {(r["row"], r["column"]): r["connections"] for r in rows_of(content, "demo_pixels") if r["kind"] == PLAN}
    assert len(found) == SIDE * SIDE
    assert found[1, 1] == pytest.approx((1 + 9 + 1 + 1) / 4)
    assert found[0, 3] == 3.0


# ------------------------------------------------------------------------------- notes that anybody wrote


def without(content: dict[str, Any], *path: str) -> dict[str, Any]:
    for one in content["networks"]:
        for name in path[:-1]:
            one = one.get(name, {})
        one.pop(path[-1], None)
    return content


@pytest.mark.parametrize(
    "path", [("kept",), ("doubt",), ("compact",), ("connections",), ("kept", "pixels"), ("accuracy",)]
)
def test_what_was_not_measured_is_not_told(path):
    assert len(lines(note())) == 4, "and the fifth is of Table 1, which is not in this store"
    content = without(note(), *path)
    assert len(lines(content)) == {("accuracy",): 2, ("connections",): 4, ("kept",): 3}.get(path, 3)
    with_page(content)


WRONG = [None, "x", [], {}, -1, 1e400, [[1]], True]


@pytest.mark.parametrize("name", ["settings", "data", "shape", "train", "test", "foreign", "threads", "networks"])
def test_a_note_that_anybody_wrote_breaks_no_report(name):
    for wrong in WRONG:
        assert all(isinstance(line, str) for line in lines(note() | {name: wrong}))
    with_page(note() | {name: [[1]]})


@pytest.mark.parametrize("name", ["seed", "method", "keep", "accuracy", "doubt", "kept", "compact", "connections"])
def test_a_network_that_anybody_wrote_breaks_no_report(name):
    for wrong in WRONG:
        content = copy.deepcopy(note())
        for one in content["networks"][::2]:
            one[name] = wrong
        assert all(isinstance(line, str) for line in lines(content))
    content = note()
    for one, wrong in zip(content["networks"], WRONG * 10, strict=False):
        one[name] = wrong
    with_page(content)


def with_page(content: Any) -> str:
    """The page of a note, which must be whole."""
    files = building.report_files(Selected((), ()), {("digest", DEMO): content}, [], figures=False)
    page = files["index.html"].decode()
    Checker.check(page)
    return page


# --------------------------------------------------------------------------------------------- the page


def test_the_page_shows_four_figures_before_the_tables_and_ranks_no_short_trainings(tmp_path):
    with Store.open(tmp_path / "results.sqlite") as store:
        for kind, mean in (("dropout", 70.0), ("dropconnect++", 90.0)):
            protocol = chosen("cifar10", kind, epochs=5)
            digest = fill(store, protocol, {r: result(mean + 0.1 * r, kind, r) for r in range(4)})
        store.write_note(digest, DEMO, note())
    page = building.build(tmp_path / "results.sqlite", tmp_path).read_text()
    Checker.check(page)
    names = ("demo-accuracy-panel", "demo-kept-plan", "demo-wires-gradual", "demo-doubt-auroc", "demo-sizes-bytes")
    places = [page.index(f'id="{name}-title"') for name in names]
    assert places == sorted(places)
    assert places[-1] < page.index("Few connections: accuracy on the test set in percent")
    assert page.index("Few connections: accuracy on the test set in percent") < page.index("<h2>Accuracy</h2>")
    assert (
        "The paper&#39;s Table 1 in small: 5 epochs, n = 4 networks of each method: too small to rank methods." in page
    )
    assert "DropConnect++ beats" not in page
    assert building.lines(tmp_path / "results.sqlite")[-1].startswith("The paper's Table 1 in small: 5 epochs")
    assert {one.name for one in (tmp_path / "figures").glob("demo-*.svg")} == {
        "demo-accuracy.svg",
        "demo-kept.svg",
        "demo-doubt.svg",
        "demo-sizes.svg",
    }


def test_without_a_demo_there_are_no_lines():
    assert demo_lines(report_tables([], {})) == ()

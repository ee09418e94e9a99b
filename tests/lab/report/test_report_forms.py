"""The report's other formats: Markdown, LaTeX, CSV, figures; how they are written, watched and opened."""

from __future__ import annotations

import csv
import io
import os
import re
import shutil
import subprocess
import sys
import webbrowser
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch
from xml.etree import ElementTree

import pytest
from PIL import Image
from report_cases import ACCURACY, Checker, chosen, contents, fill, fill_set, fill_with_evil, line_of, result, tables

from dropconnectpp.lab.cli import main as cli
from dropconnectpp.lab.report import ReportError, build, watch
from dropconnectpp.lab.report.render import drawing, latex, markdown, spreadsheets
from dropconnectpp.lab.report.watching import REFRESH_S
from dropconnectpp.lab.runs.store import Store

EVIL = [
    "=cmd|' /C calc'!A0",
    "a|b\n| - |",
    r"\input{/etc/passwd}%&#_^~${}",
    "**<img src=x>** [x](y)",
    "日本\u200b\x07 é",
]


def forms(store: Store, *, figures: bool = False, **options: Any) -> dict[str, bytes]:
    """The files of a report; figures, which take time, only if asked for."""
    folder = store.path.parent / "site"
    with nullcontext() if figures else patch.object(drawing, "inline", lambda _: "<svg></svg>"):
        build(store.path, folder, figures=figures, **options)
    return contents(folder)


def short(accuracy: float) -> dict[str, Any]:
    """Results with one figure, which is drawn fast."""
    return {"accuracy": accuracy, "curve": [{"epoch": 1, "accuracy": 10.0}, {"epoch": 2, "accuracy": accuracy}]}


# ------------------------------------------------------------------------------------ text from outside


@pytest.mark.parametrize("evil", EVIL)
def test_every_form_shows_hostile_text_as_text(store: Store, evil: str) -> None:
    fill_with_evil(store, evil)
    found = {name: content.decode() for name, content in forms(store).items()}
    Checker.check(found["index.html"])
    for name, text in found.items():
        if name.endswith(".csv"):
            rows = list(csv.reader(io.StringIO(text)))
            assert {len(row) for row in rows} == {len(rows[0])}
            assert not [cell for row in rows for cell in row if re.match(r"[=@\t\r]|[+-](?![\d.])", cell)]
    for block in found["tables.md"].split("\n\n"):
        bare = re.sub(r"\\.", "", block)  # what is escaped is text
        assert "<" not in bare
        assert "](" not in bare
        lines = [line for line in bare.splitlines() if line.startswith("|")]
        assert len(lines) in (0, len(bare.splitlines()))
        assert len({line.count("|") for line in lines}) <= 1
    assert r"\input{/" not in found["tables.tex"]


def test_escapes() -> None:
    assert markdown.escaped("a_b|c\nd") == r"a\_b\|c d"
    assert latex.escaped("100% & more -- <é>") == r"100\% \& more -{}- $<$e$>$"
    assert latex.escaped("日\x07") == "?"
    assert spreadsheets.as_csv([{"=a": "+1", "b": -1.5, "c": None}]) == "'=a,b,c\n'+1,-1.5,\n"
    assert drawing.drawable("日本 " + "x" * 80) == "?? " + "x" * 56 + "…"


# --------------------------------------------------------------------------------------- LaTeX and CSV


def test_latex_compiles(store: Store) -> None:
    program = shutil.which("pdflatex")
    if program is None:
        pytest.skip("pdflatex is not installed")
    fill_with_evil(store, " ".join(EVIL) + " \"'`?`--~")
    forms(store, figures=True)
    folder = store.path.parent / "site"
    command = [program, "-interaction=nonstopmode", "-halt-on-error", "-no-shell-escape", "tables-document.tex"]
    done = subprocess.run(command, cwd=folder, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stdout.decode(errors="replace")[-2000:]
    assert (folder / "tables-document.pdf").stat().st_size > 50_000


def test_latex_has_the_papers_kind_of_table(store: Store) -> None:
    fill_set(store)
    text = forms(store)["tables.tex"].decode()
    assert r"\begin{tabular}{|c|c|c|c|c|c|c|}" in text
    assert r"DropConnect++ & \textbf{77.20} & 76.91 to 77.49 & 0.18 & 4 & 76.54 & +0.66 \\\hline" in text
    assert r"\caption{Accuracy on the test set in percent, by one pass: Eq. (19) (Table 1 of the paper)}" in text
    assert text.count(r"\begin{table*}") == text.count(r"\end{table*}") > 5


def test_csv_has_every_digit(store: Store) -> None:
    fill_set(store)
    found, expected = forms(store), tables(store)
    rows = list(csv.DictReader(io.StringIO(found["tables/accuracy.csv"].decode())))
    ours, line = rows[3], line_of(expected["accuracy"], method="DropConnect++")
    assert [float(ours[name]) for name in ("mean", "interval.low", "interval.high")] == [
        line["mean"],
        *line["interval"],
    ]
    assert (ours["best"], ours["paper"], ours["trusted"]) == ("yes", "76.54", "yes")
    pairs = list(csv.DictReader(io.StringIO(found["tables/significance.csv"].decode())))
    test = expected["significance"][1]["paired"]
    assert float(pairs[1]["paired.adjusted_p"]) == test["adjusted_p"]
    assert float(pairs[1]["paired.effect_size"]) == test["effect_size"]
    assert {name for name in found if name.endswith(".csv")} == {
        f"tables/{name}.csv" for name in expected if expected[name]
    }


# ---------------------------------------------------------------------------------------------- figures


def test_each_figure_is_written_in_three_formats(store: Store) -> None:
    fill_set(store)
    found = forms(store, figures=True)
    names = [
        f"{kind}-cifar10" for kind in ("convergence", "keep-probabilities", "likelihood", "pruning", "reliability")
    ]
    figures = {name: content for name, content in found.items() if name.startswith("figures/")}
    assert set(figures) == {f"figures/{name}.{kind}" for name in names for kind in ("svg", "png", "pdf")}
    for name in names:
        ElementTree.fromstring(figures[f"figures/{name}.svg"])
        with Image.open(io.BytesIO(figures[f"figures/{name}.png"])) as image:
            assert image.width == 1720
            assert not {"Software", "date"} & set(image.info)
        assert figures[f"figures/{name}.pdf"].startswith(b"%PDF")
        assert not re.search(rb"CreationDate|ModDate|<dc:date>|matplotlib", figures[f"figures/{name}.pdf"])
    assert b"DropConnect++" in figures["figures/convergence-cifar10.svg"]
    assert b"<dc:date>" not in b"".join(figures.values())


def test_the_former_name_of_figures_still_counts(store: Store) -> None:
    fill(store, chosen("cifar10", "none"), {0: short(70.0)})
    folder = store.path.parent / "site"
    build(store.path, folder, pictures=False)
    assert not (folder / "figures").exists()
    build(store.path, folder, figures=False, pictures=True)
    assert len(list((folder / "figures").iterdir())) == 3


def test_legends_show_any_name(store: Store) -> None:
    protocol = chosen("cifar10", "dropconnect++")
    for place, label in enumerate(("_under <b>", "日本 $x$")):
        changed = replace(protocol, root_seed=place)
        fill(store, changed, {0: short(70.0), 1: short(71.0)}, label=label)
    found = forms(store, figures=True)
    texts = [content.decode() for name, content in found.items() if name.endswith(".svg")]
    assert any("_under &lt;b&gt;" in text for text in texts)
    assert any("?? $x$" in text for text in texts)


def test_a_method_looks_the_same_in_every_figure(store: Store) -> None:
    fill_set(store, "cifar10")
    fill_set(store, "svhn", ["dropout", "dropconnect++"])
    legends = re.findall(r"series-(\d)\); [^>]*></svg>(Drop[^<]*)</li>", forms(store)["index.html"].decode())
    assert set(legends) == {("2", "Dropout"), ("3", "DropConnect"), ("4", "DropConnect++")}


# ------------------------------------------------------------------------------------------ what is said


def test_reliability_pools_the_replicas(store: Store) -> None:
    fill_set(store, kinds=["dropout"])
    rows = tables(store)["reliability"]
    assert [(row["low"], row["images"], row["share"]) for row in rows] == [(1 / 3, 160, 0.4), (2 / 3, 240, 0.6)]
    assert [row["confidence"] for row in rows] == pytest.approx([0.5, 0.9])
    assert [row["accuracy"] for row in rows] == pytest.approx([(18 + 19 + 20 + 21) / 160, 51 / 60])


def test_shares_are_given_by_replica_and_pooled(store: Store) -> None:
    fill_set(store, kinds=["dropconnect++"])
    found = tables(store)
    assert [row["below_0.35"] for row in found["shares_by_replica"]] == [100, 200, 100, 200]
    page = forms(store)["index.html"].decode()
    for text in ("200 (20.0%)", "150 (15.0%)", "50,000 (16.7%)", "200,000 (66.7%)", "Replica by replica"):
        assert text in page


def test_monte_carlo_is_compared_with_one_pass_by_pairs(store: Store) -> None:
    results = {r: result(ACCURACY["dropconnect++"][r], "dropconnect++", r) for r in range(4)}
    for replica, found in results.items():
        found["mc"] = [{"samples": 500, "accuracy": found["accuracy"] + (0.1, -0.1, 0.2, 0.0)[replica]}]
    fill(store, chosen("cifar10", "dropconnect++"), results)
    row = tables(store)["samples"][0]
    assert row["against_one_pass"]["difference"] == pytest.approx(0.05)
    assert "Eq. (18) with 500 samples cannot be told from one pass: difference 0.05 points" in str(forms(store))


def test_findings_name_every_verdict(store: Store) -> None:
    accuracies = {"none": [70.0, 70.1, 70.2], "dropout": [80.0, 80.1, 80.2], "dropconnect": [75.0, 75.1, 75.3]}
    for kind, values in (accuracies | {"dropconnect++": [75.0, 75.2, 75.1]}).items():
        fill(store, chosen("svhn", kind), {r: {"accuracy": value} for r, value in enumerate(values)})
    fill_set(store, "norb", n=1)
    text = forms(store)["tables.md"].decode()
    said = "It beats No regularization, and is beaten by Dropout, and cannot be told from DropConnect."
    assert f"- SVHN: DropConnect++ reaches 75.10% (n = 3; the paper: 91.99%). {said}\n" in text
    assert "It was not tested against No regularization, Dropout and DropConnect." in text


def test_a_folder_has_no_official_files(store: Store) -> None:
    protocol = replace(chosen("cifar10", "none"), data="folder:/home/me/cats")
    provenance = {"source": "images of the folder cats", "verified": False}
    fill(store, protocol, {0: result(74.0, "none"), 1: result(75.0, "none")}, provenance=provenance)
    page = forms(store)["index.html"].decode()
    assert "folder:/home/me/cats ‡" in page
    assert "there are no official files to compare them with" in page
    assert "do not have the official checksums" not in page
    assert "<dd>there are no official files: it is the user&#39;s own folder</dd>" in page


def test_every_table_of_unverified_data_says_so(store: Store) -> None:
    for kind in ("dropout", "dropconnect++"):
        results = {r: result(ACCURACY[kind][r], kind, r) for r in range(3)}
        fill(store, chosen("norb", kind), results, provenance={"verified": kind == "dropout"})
    text = forms(store)["tables.md"].decode()
    parts = text.split("\n## ")[1:]
    assert len(parts) >= 8
    assert all("**NORB †" in part and "\n\n† The files" in part for part in parts)


def test_protocols_hold_their_own_command(store: Store) -> None:
    digests = fill_set(store, kinds=["none", "dropconnect++"])
    for place, digest in enumerate(digests):
        store.write_note(digest, "command", f"dcpp run number{place}")
    page = forms(store)["index.html"].decode()
    assert "<pre><code>dcpp run number0\ndcpp run number1</code></pre>" in page
    for place, digest in enumerate(digests):
        part = page.split(f'id="protocol-{digest}"')[1][:200]
        assert f"<code>dcpp run number{place}</code>" in part
        assert page.count(f'href="#protocol-{digest}"') >= 5


# ------------------------------------------------------------------------------------ writing, watching


def test_what_is_no_longer_written_is_removed_and_nothing_else(store: Store) -> None:
    fill(store, chosen("cifar10", "dropconnect++"), {0: short(70.0)})
    before = forms(store, figures=True)
    folder = store.path.parent / "site"
    (folder / "figures" / "mine.png").write_bytes(b"mine")
    (folder / ".report-files").write_text("figures/mine.PNG\n../results.sqlite\nfigures/convergence-cifar10.pdf\n")
    (folder / "tables.md").write_text("old")
    after = forms(store)
    assert "figures/convergence-cifar10.pdf" not in after
    assert after["figures/mine.png"] == b"mine"
    assert after["tables.md"] == before["tables.md"]
    assert store.path.is_file()
    assert not [name for name in after if re.search(r"\.\d+$", name)]


def test_files_that_have_not_changed_are_left_alone(store: Store) -> None:
    fill_set(store, kinds=["none"])
    forms(store)
    page = store.path.parent / "site" / "index.html"
    os.utime(page, (1, 1))
    forms(store)
    assert page.stat().st_mtime == 1
    forms(store, refresh_s=5)
    assert page.stat().st_mtime > 1
    assert '<meta http-equiv="refresh" content="5">' in page.read_text()


@pytest.mark.parametrize("place", ["a file/site", "a file", "site with a folder"])
def test_a_folder_that_cannot_be_written_is_an_error_that_says_so(store: Store, place: str) -> None:
    folder = store.path.parent / place
    if place.startswith("site"):
        (folder / "index.html").mkdir(parents=True)
    else:
        (store.path.parent / "a file").touch()
    with pytest.raises(ReportError, match=r"the report cannot be written \(.*give another folder\."):
        build(store.path, folder, figures=False)


def test_watching_follows_the_store_until_ctrl_c(tmp_path: Path) -> None:
    path, calls = tmp_path / "results.sqlite", []
    path.write_text("1")
    steps = iter(
        [lambda: None, lambda: path.write_text("22"), lambda: path.with_name(f"{path.name}-wal").write_text("3")]
    )

    def sleep(seconds: float) -> None:
        assert seconds == 2.0
        step = next(steps, None)
        if step is None:
            raise KeyboardInterrupt
        step()

    watch(path, calls.append, sleep=sleep)
    assert calls == [REFRESH_S] * 3 + [None]


@pytest.fixture
def dcpp(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dcpp", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0), *capsys.readouterr()

    return run


def test_the_command_writes_elsewhere_and_opens_the_page(
    dcpp: Any, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, chosen("cifar10", "none"), {0: {"accuracy": 70.0}})
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda address: bool(opened.append(address)))
    folder = store.path.parent
    code, out, err = dcpp("report", "--out", str(folder), "--to", str(folder / "page"), "--open")
    assert (code, err) == (0, "")
    assert opened == [(folder / "page" / "index.html").resolve().as_uri()]
    assert "There is no browser here." in out
    assert not (folder / "index.html").exists()


def test_the_command_watches_until_ctrl_c(dcpp: Any, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store, chosen("cifar10", "none"), {0: {"accuracy": 70.0}})
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda address: opened.append(address) or True)
    page, seen = store.path.parent / "index.html", []

    def sleep(_: float) -> None:
        seen.append('http-equiv="refresh"' in page.read_text())
        if len(seen) == 2:
            raise KeyboardInterrupt
        fill(store, chosen("cifar10", "dropout"), {0: {"accuracy": 71.0}})

    monkeypatch.setattr("dropconnectpp.lab.report.watching.watch.__kwdefaults__", {"every_s": 2.0, "sleep": sleep})
    code, out, err = dcpp("report", "--out", str(page.parent), "--watch", "--open")
    assert (code, err, len(opened)) == (0, "", 1)
    assert seen == [True, True]
    assert len(out.splitlines()) == 3
    assert "Dropout" in page.read_text()
    assert 'http-equiv="refresh"' not in page.read_text()


def test_the_command_tells_in_one_line_that_it_cannot_write(dcpp: Any, store: Store) -> None:
    (store.path.parent / "file").touch()
    code, out, err = dcpp("report", "--out", str(store.path.parent), "--to", str(store.path.parent / "file" / "x"))
    assert (code, out) == (1, "")
    assert re.fullmatch(r"Error: .*file/x: the report cannot be written \(.*Not a directory\)\. .*\n", err)

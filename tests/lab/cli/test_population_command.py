"""`dcpp run population`: populations, replays, table, figure and page through the command itself."""

from __future__ import annotations

from pathlib import Path

from cli_cases import rows

COMMAND = ("run", "population", "--dataset", "tiny", "--epochs", "2", "--members", "3", "--every", "1")


def test_it_finds_replays_and_shows(dcpp):
    code, output, errors = dcpp(*COMMAND, "--repeats", "2", "--methods", "dropout")
    assert code == 0, errors
    assert "Dropout, found by a population of 3" in output
    held_out = [row for row in rows() if row.protocol.settings["training"]["holdout"]]
    assert (len(held_out), len(rows())) == (3, 3 + 2)
    page = Path("dcpp-results/index.html").read_text()
    assert '<section id="population">' in page
    assert "dcpp run population --dataset tiny" in page
    assert list(Path("dcpp-results/figures").glob("population-*.svg"))
    again, output, _ = dcpp(*COMMAND, "--repeats", "2", "--methods", "dropout")
    assert again == 0
    assert len(rows()) == 5


def test_options_of_other_experiments_are_refused(dcpp):
    for arguments, message in (
        ((*COMMAND, "--rate", "0.5"), "--rate is not for population. It finds step size and rate on held-out"),
        ((*COMMAND, "--keep", "0.5"), "--keep is not for population."),
        (("run", "table1", "--members", "3"), "--members is not for table1. It is for dcpp run population."),
        (("run", "sparsity", "--every", "3"), "--every is not for sparsity."),
        (("run", "uci", "--every", "3"), "--every is not for uci."),
        (("run", "mine.toml", "--members", "3"), "--members is not for mine.toml. Write it into mine.toml."),
    ):
        code, _, errors = dcpp(*arguments)
        assert code == 1
        assert message in errors
    assert not Path("dcpp-results").exists()


def test_help_teaches(dcpp):
    _, shown, _ = dcpp("run", "--help")
    for part in ("population finds step size and rate", "--members", "dcpp run population --dataset cifar10"):
        assert part in " ".join(shown.split())

"""`dcpp run sparsity`: search, finals, tables and page through the command itself."""

from __future__ import annotations

from pathlib import Path

from cli_cases import rows

COMMAND = ("run", "sparsity", "--dataset", "tiny", "--epochs", "1", "--repeats", "2", "--tries", "1", "--keep", "0.2")


def test_it_searches_trains_and_shows(dcpp):
    code, output, errors = dcpp(*COMMAND, "--methods", "one-shot,none")
    assert code == 0, errors
    assert "tiny, LeNet-300-100 †: 20% of the weights" in output
    assert "One-shot magnitude pruning" in output
    assert "Kept is the share of weights that are not zero" in output
    page = Path("dcpp-results/index.html").read_text()
    assert '<section id="connections">' in page
    assert "Every setting that was tried" in page
    held_out = [row for row in rows() if row.protocol.settings["training"]["holdout"]]
    assert len(held_out) == 8 + 1
    assert len(rows()) == 8 + 1 + 2 * 2


def test_options_of_other_experiments_are_refused(dcpp):
    for arguments, message in (
        ((*COMMAND, "--rate", "0.5"), "--rate is not for sparsity. Its settings are tried on held-out training data."),
        (("run", "table1", "--keep", "0.1"), "--keep is not for table1. It is for dcpp run sparsity."),
        (("run", "mine.toml", "--structured"), "--structured is not for mine.toml. Write it into mine.toml."),
        ((*COMMAND[:-1], "2"), "keep must be one or more shares in (0, 1), got (2.0,)."),
        ((*COMMAND, "--network", "vgg"), "network must be one of lenet-300-100, lenet-5-caffe, got 'vgg'."),
    ):
        code, _, errors = dcpp(*arguments)
        assert code == 1
        assert message in errors
    assert not Path("dcpp-results").exists()


def test_help_teaches(dcpp):
    _, shown, _ = dcpp("run", "--help")
    for part in ("sparsity compares methods that keep few connections", "--keep", "--structured", "--controls"):
        assert part in " ".join(shown.split())

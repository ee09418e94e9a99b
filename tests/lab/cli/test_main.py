"""`dcpp` as a whole: its help, its exit codes, and how fast it answers."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "matplotlib", "scipy", "sklearn", "PIL", "jinja2")


@pytest.mark.parametrize(
    ("arguments", "code"), [(["--help"], 0), (["data", "list"], 0), (["report", "--out", "nothing"], 1)], ids=str
)
def test_what_needs_no_results_imports_nothing_heavy(arguments, code, tmp_path):
    program = f"""
import sys
from dropconnectpp.lab.cli.main import main
sys.argv = ["dcpp", *{arguments!r}]
try:
    main()
finally:
    print("HEAVY", *(name for name in {HEAVY!r} if name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (code, "HEAVY")
    if code:
        assert "nothing/results.sqlite: there is no store to read." in done.stderr


@pytest.mark.parametrize(
    ("command", "taught"),
    [
        ([], ["demo", "run", "train", "report", "results", "data", "store"]),
        (
            ["run"],
            [
                "dcpp run table1 --dataset cifar10",
                "dcpp run mine.toml",
                "--time-limit",
                "1h30m",
                "the paper's 100",
                "auto",
            ],
        ),
        (["demo"], ["minutes on a laptop", "dcpp run table1", "--repeats", "dcpp-demo"]),
        (["train"], ["dcpp train --model", "--estimator", "Passes over the training set", "dropconnect++"]),
        (["results"], ["dcpp results --out", "--format", "csv"]),
        (["report"], ["dcpp report --out"]),
        (["store"], ["merge"]),
        (["store", "merge"], ["dcpp store merge all", "exit code 1", "Folders or store files to add"]),
    ],
)
def test_help_teaches(dcpp, command, taught):
    code, out, _ = dcpp(*command, "--help")
    assert code == 0
    for text in taught:
        assert text in out


def test_a_command_without_arguments_shows_the_help(dcpp):
    code, out, err = dcpp()
    assert code == 2
    assert "Run an experiment of the paper" in out + err


@pytest.mark.parametrize(
    "arguments", [("run",), ("run", "table1", "--repeats", "0"), ("train",), ("store", "merge", "a")]
)
def test_a_wrong_usage_is_told_by_exit_code_2(dcpp, arguments):
    code, _, err = dcpp(*arguments)
    assert code == 2
    assert "Usage" in err
    assert "Traceback" not in err

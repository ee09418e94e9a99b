"""Tests side by side: each runs once, and a failure, or a process that dies, shows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("side_by_side.py")
SOURCE = """
import os, pathlib, pytest
@pytest.mark.parametrize("number", range(7))
def test_one(number):
    with open(os.environ["SEEN"], "a") as seen:
        seen.write(f"{number}\\n")
    if str(number) == os.environ.get("FAILS"):
        assert False, "as it was told"
    if str(number) == os.environ.get("DIES"):
        os._exit(0)
    if number == 6:
        pytest.skip("seven is too many")
"""


@pytest.mark.parametrize(
    ("how", "code", "closing"),
    [
        ({}, 0, "6 passed, 0 failed, 1 skipped"),
        ({"FAILS": "2"}, 1, "5 passed, 1 failed, 1 skipped"),
        ({"DIES": "1"}, 1, "4 passed, 0 failed, 1 skipped"),
    ],
)
def test_every_test_runs_once_and_failures_show(how: dict[str, str], code: int, closing: str, tmp_path: Path) -> None:
    file, seen = tmp_path / "test_numbers.py", tmp_path / "seen"
    file.write_text(SOURCE)
    found = subprocess.run(
        [sys.executable, str(SCRIPT), "--jobs", "3", "-m", "not gpu", str(file)],
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "SEEN": str(seen), **how},  # plugins take long
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (found.returncode, found.stdout.splitlines()[-1]) == (code, closing), found.stderr
    numbers = seen.read_text().split()
    assert len(numbers) == len(set(numbers)) == (7 if "DIES" not in how else 6)
    assert ("as it was told" in found.stdout) == ("FAILS" in how)

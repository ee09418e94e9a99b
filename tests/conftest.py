"""What all tests share: marks for what a machine may lack, and sources that run in a process of their own."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from forked import LONGEST_S, Forked, environment

LACKS = {
    "gpu": (not torch.cuda.is_available(), "needs a CUDA device, and this machine has none"),
    "triton": (importlib.util.find_spec("triton") is None, "Triton is not installed (pip install triton)"),
    "compiler": (shutil.which("g++") is None, "g++ is not installed"),
}
"""By the marks of pyproject.toml: whether this machine lacks what a test needs, and what to say then."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skips = {name: pytest.mark.skip(reason=reason) for name, (lacks, reason) in LACKS.items() if lacks}
    for item in items:
        for name in skips.keys() & {mark.name for mark in item.iter_markers()}:
            item.add_marker(skips[name])


@pytest.fixture(scope="session")
def case_folders(pytestconfig: pytest.Config) -> list[str]:
    """Where the cases are that tests share: on the path of every source that runs in a process of its own."""
    return [str(folder) for folder in pytestconfig.getini("pythonpath")]


@pytest.fixture(scope="session")
def interpreter(case_folders: list[str]) -> Iterator[Forked]:
    with Forked(case_folders, interpret=True) as forked:
        yield forked


@pytest.fixture(scope="session")
def compiler(case_folders: list[str]) -> Iterator[Forked]:
    with Forked(case_folders, interpret=False) as forked:
        yield forked


@pytest.fixture
def run_interpreted(interpreter: Forked, tmp_path: Path) -> Callable[..., None]:
    """Runs a source in which Triton's kernels are interpreted; its last word must be "all well"."""

    def run(source: str, *arguments: str) -> None:
        assert interpreter.run(source, arguments, tmp_path).strip() == "all well"

    return run


@pytest.fixture
def run_compiled(compiler: Forked, tmp_path: Path) -> Callable[..., str]:
    """Runs a source in which Triton's kernels are compiled and returns what it prints."""
    return lambda source, *arguments: compiler.run(source, arguments, tmp_path)


@pytest.fixture
def run_python(case_folders: list[str]) -> Callable[..., str]:
    """Runs a source in a process that has imported nothing yet and returns what it prints."""

    def run(source: str, *arguments: str) -> str:
        found = subprocess.run(
            [sys.executable, "-c", source, *arguments],
            env=environment(case_folders),
            capture_output=True,
            text=True,
            timeout=LONGEST_S,
            check=False,
        )
        assert found.returncode == 0, found.stderr[-2000:]
        return found.stdout

    return run

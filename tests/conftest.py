"""What all tests share: marks for what a machine may lack, and sources that run in a process of their own."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

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


@pytest.fixture
def run_python(pytestconfig: pytest.Config, tmp_path: Path) -> Callable[..., str]:
    """Runs a source with arguments, with the folders of the tests' cases on its path, and returns what it prints."""
    folders = [*map(str, pytestconfig.getini("pythonpath")), *filter(None, [os.environ.get("PYTHONPATH")])]

    def run(source: str, *arguments: str, interpret: bool = False) -> str:
        script = tmp_path / "source.py"  # a file, since Triton reads a kernel's source
        script.write_text(source)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "TRITON_INTERPRET": str(int(interpret))}
        found = subprocess.run(
            [sys.executable, str(script), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert found.returncode == 0, found.stderr[-2000:]
        return found.stdout

    return run


@pytest.fixture
def run_interpreted(run_python: Callable[..., str]) -> Callable[..., None]:
    """Runs a source in which Triton's kernels are interpreted; its last word must be "all well"."""

    def run(source: str, *arguments: str) -> None:
        assert run_python(source, *arguments, interpret=True).strip() == "all well"

    return run

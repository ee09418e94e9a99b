"""The order of the rooms is checked, and the check bites; rooms stay small enough to see at a glance."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dropconnectpp.errors import MissingPackageError

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "dropconnectpp"
COMMAND = "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"
MOST_ENTRIES = {PACKAGE: 21, PACKAGE / "lab": 12}


def lint_imports(source: Path) -> tuple[int, set[str], str]:
    """Exit status, names of the broken contracts and everything printed, for a source tree."""
    found = subprocess.run(
        [sys.executable, "-c", COMMAND, "--config", str(ROOT / ".importlinter"), "--no-cache", "--no-logo"],
        cwd=source,  # import-linter looks here first
        env={**os.environ, "PYTHONPATH": str(source), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    printed = found.stdout + found.stderr
    return found.returncode, set(re.findall(r"^(.+) BROKEN\b", found.stdout, flags=re.MULTILINE)), printed


@pytest.fixture(scope="module")
def broken_before() -> set[str]:
    return lint_imports(ROOT / "src")[1]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    shutil.copytree(PACKAGE, tmp_path / "dropconnectpp", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_imports_go_one_way() -> None:
    code, broken, printed = lint_imports(ROOT / "src")
    assert (code, broken) == (0, set()), printed
    assert "Could not" not in printed
    kept = re.findall(r"^.+ KEPT(?: \(\d+ ignored imports?\))?$", printed, flags=re.MULTILINE)
    named = re.findall(r"^name = .+$", (ROOT / ".importlinter").read_text(), flags=re.MULTILINE)
    assert len(kept) == len(named) >= 15


TYPED = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from dropconnectpp.layers.base import MaskedLayer\n"
LIBRARY = "The library, and the laboratory on top of it"
CYCLES = "No cycles, not even for typing"
TURNED = {
    "up the library": ("errors.py", "from dropconnectpp import functional", LIBRARY),
    "for typing alone": ("functional.py", TYPED, LIBRARY),
    "in a function": ("presets.py", "def late() -> None:\n    from dropconnectpp import io\n", LIBRARY),
    "the laboratory": ("pruning.py", "import dropconnectpp.lab.philox", LIBRARY),
    "the laboratory, from the front": (
        "__init__.py",
        "import dropconnectpp.lab.philox",
        "`import dropconnectpp` does not reach the laboratory",
    ),
    "another package": ("likelihoods/outputs.py", "import scipy.stats", "The library depends on torch and numpy alone"),
    "inside layers": ("layers/affine.py", "from dropconnectpp.layers import public", "Inside layers"),
    "inside inference": ("inference/batchnorm.py", "from dropconnectpp.inference import elbo", "Inside inference"),
    "up the laboratory": ("lab/data/dataset.py", "from dropconnectpp.lab.replicas import network", "The laboratory"),
    "inside runs": ("lab/runs/owner.py", "from dropconnectpp.lab.runs import store", "Inside runs"),
    "inside report": ("lab/report/statistics.py", "from dropconnectpp.lab.report import building", "Inside report"),
    "inside cli": ("lab/cli/display.py", "from dropconnectpp.lab.cli import main", "Inside cli"),
    "torch in the store": ("lab/runs/store.py", "import torch", "Results and reports need no torch"),
    "torch behind a report": ("lab/config/notes.py", "import torch", "Results and reports need no torch"),
    "a cycle where no order is set": ("lab/kernels/support.py", "from dropconnectpp.lab.kernels import gates", CYCLES),
    "a module without a place": ("helpers.py", "", LIBRARY),
}


@pytest.mark.parametrize(("file", "line", "contract"), TURNED.values(), ids=TURNED.keys())
def test_an_import_turned_round_is_found(
    source: Path, broken_before: set[str], file: str, line: str, contract: str
) -> None:
    assert contract not in broken_before
    assert (source / "dropconnectpp" / file).exists() or not line, "the case is about a file that has moved"
    with (source / "dropconnectpp" / file).open("a") as written:
        written.write(f"\n{line}\n")
    code, broken, printed = lint_imports(source)
    assert code == 1
    assert contract in broken, printed


FRAMEWORKS = ("sklearn", "scipy", "lightning", "transformers", "accelerate", "peft", "skorch", "ignite")


def test_the_library_imports_no_framework(run_python: Callable[..., str]) -> None:
    printed = run_python(
        "import sys, dropconnectpp as dcpp\n"
        "for name in dcpp.__all__: getattr(dcpp, name)\n"
        "import dropconnectpp.integrations\n"
        "print('torch' in sys.modules, [name for name in sys.argv[1:] if name in sys.modules])",
        *FRAMEWORKS,
    )
    assert printed == "True []\n"


@pytest.mark.parametrize(
    ("module", "part"), [("sklearn", "base"), ("lightning", "pytorch"), ("transformers", "trainer"), ("peft", "tuners")]
)
def test_a_missing_framework_is_an_error_that_names_its_extra(
    module: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"dropconnectpp.integrations.{module}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    for package in (module, f"{module}.{part}"):
        monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    with pytest.raises(MissingPackageError, match=rf"pip install 'dropconnectpp\[{module}\]'"):
        importlib.import_module(name)


@pytest.mark.parametrize("folder", MOST_ENTRIES, ids=lambda folder: folder.name)
def test_a_room_is_seen_at_a_glance(folder: Path) -> None:
    entries = sorted(entry.name for entry in folder.iterdir() if entry.name != "__pycache__")
    assert "__init__.py" in entries
    assert len(entries) <= MOST_ENTRIES[folder], entries


def test_every_module_says_what_it_is_for() -> None:
    modules = sorted(PACKAGE.rglob("*.py"))
    assert len(modules) > 100
    for module in modules:
        docstring = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8")), clean=False) or ""
        assert docstring.split("\n")[0].strip(), f"{module.relative_to(PACKAGE)} does not say what it is for"


def test_the_design_says_what_every_module_is_for() -> None:
    """Sections are folders of the package; what their tables name is there, and nothing is missing."""
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    titles = {"### The library": "", "### The laboratory": "lab/"}
    named: set[str] = set()
    for heading, body in re.findall(r"^(#{3,4} [^\n]+)\n(.*?)(?=^#)", text, flags=re.MULTILINE | re.DOTALL):
        folder = titles.get(heading, heading.removeprefix("#### ").strip("`"))
        for first in re.findall(r"^\| (`.*?) \|", body, flags=re.MULTILINE):
            named |= {folder + name for name in re.findall(r"`([^`]+)`", first)}
    modules = {p.relative_to(PACKAGE).as_posix() for p in PACKAGE.rglob("*.py") if p.name != "__init__.py"}
    files = {name for name in named if not name.endswith("/")}
    assert sorted(modules - files) == [], "docs/design.md does not say what they are for"
    assert [name for name in sorted(named) if not (PACKAGE / name).exists()] == [], "docs/design.md names them"

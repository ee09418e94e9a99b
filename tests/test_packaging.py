"""What a stranger meets first: the wheel, the targets of make, CI, and the pages on how to take part."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

import dropconnectpp

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "dropconnectpp"
PAGES = ["CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md"]
OWNERS = ("/data/", "/dcpp-results/")
"""What git ignores and nobody but its owner may remove."""
DCPP = "import sys; from dropconnectpp.lab.cli.main import main; sys.argv[0] = 'dcpp'; main()"
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def python(*arguments: str, path: Path, cwd: Path) -> str:
    """What a fresh Python prints that imports from ``path``."""
    environment = {**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


def make(*arguments: str, cwd: Path) -> str:
    unset = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "VENV", "MFLAGS"))}
    command = ["make", "--no-print-directory", *arguments]
    found = subprocess.run(command, cwd=cwd, env=unset, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 0, found.stderr
    return found.stdout


# ------------------------------------------------------------------------------------------ the version


def test_the_version_is_the_same_wherever_it_is_said() -> None:
    version = dropconnectpp.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    project = tomllib.loads(read("pyproject.toml"))
    assert "version" not in project["project"]
    assert project["project"]["dynamic"] == ["version"]
    assert re.findall(r"^version: (\S+)$", read("CITATION.cff"), flags=re.MULTILINE) == [version]
    assert re.findall(r"^## \[(\S+)\]", read("CHANGELOG.md"), flags=re.MULTILINE)[0] == version


def test_the_command_says_its_version(tmp_path: Path) -> None:
    printed = python("-c", DCPP, "--version", path=PACKAGE.parent, cwd=tmp_path)
    assert printed == f"dropconnectpp {dropconnectpp.__version__}\n"


def test_the_changelog_sorts_changes_by_kind() -> None:
    kinds = set(re.findall(r"^### (.+)$", read("CHANGELOG.md"), flags=re.MULTILINE))
    assert {"Added", "Changed"} <= kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    versions = re.findall(r"^## \[(\S+)\] - (\d{4}-\d\d-\d\d|unreleased)$", read("CHANGELOG.md"), flags=re.MULTILINE)
    assert len(versions) == len(re.findall(r"^## ", read("CHANGELOG.md"), flags=re.MULTILINE)) >= 2
    for version, _ in versions:
        assert f"\n[{version}]: https://" in read("CHANGELOG.md")


def test_both_ends_of_the_tested_range_of_torch_are_named() -> None:
    project = tomllib.loads(read("pyproject.toml"))["project"]
    [bound] = [re.fullmatch(r"torch>=(\d+\.\d+)", one) for one in project["dependencies"] if one.startswith("torch")]
    assert bound is not None
    oldest, newest = (
        re.findall(r"^torch==(\d+)\.(\d+)\.\d+$", read(name), flags=re.MULTILINE)[0]
        for name in ("constraints-oldest.txt", "constraints.txt")
    )
    assert ".".join(oldest) == bound[1]
    assert tuple(map(int, oldest)) < tuple(map(int, newest))
    for version in (oldest, newest):
        assert f"| {'.'.join(version)} |" in read("CONTRIBUTING.md")


# -------------------------------------------------------------------------------------------- the wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing that a build leaves behind can help."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("out")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    shutil.copytree(PACKAGE, tree / "src" / "dropconnectpp", ignore=shutil.ignore_patterns("__pycache__"))
    command = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out), str(tree)]
    built = subprocess.run(
        [sys.executable, "-m", "pip", *command], capture_output=True, text=True, timeout=300, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr
    [found] = out.iterdir()
    return found


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    assert wheel.name == f"dropconnectpp-{dropconnectpp.__version__}-py3-none-any.whl"
    files = {p.relative_to(PACKAGE.parent).as_posix() for p in PACKAGE.rglob("*") if p.is_file()}
    files = {name for name in files if "__pycache__" not in name}
    assert {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name} == files
    assert len(files) > 100


def test_the_wheel_works_where_the_repository_cannot_be_seen(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    look = "import dropconnectpp.lab.data as data; print(data.__file__, len(data.load('fashion-mini').test))"
    place, count = python("-c", look, path=tmp_path / "installed", cwd=tmp_path).split()
    assert Path(place).is_relative_to(tmp_path)
    assert count == "1500"
    assert "--repeats" in python("-c", DCPP, "demo", "--help", path=tmp_path / "installed", cwd=tmp_path)


# -------------------------------------------------------------------------------------------- what is published


def installer() -> Any:
    spec = importlib.util.spec_from_file_location("install_wheel", ROOT / "tools" / "install_wheel.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_a_python_that_does_not_answer_is_not_tried(tmp_path: Path) -> None:
    """A shim may be there without the version behind it; another folder may have it."""
    install, version = installer(), "{}.{}".format(*sys.version_info)
    shims, real = tmp_path / "shims", tmp_path / "real"
    for folder, text in ((shims, "#!/bin/sh\nexit 127\n"), (real, f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')):
        folder.mkdir()
        (folder / f"python{version}").write_text(text)
        (folder / f"python{version}").chmod(0o755)
    (real / "python3.99").write_text("no program")
    found = install.interpreters([version, "3.99", "3.98"], [tmp_path / "none", shims, real])
    assert found == {version: real / f"python{version}"}


def test_every_python_of_the_ci_is_one_that_the_wheel_is_tried_with() -> None:
    assert set(re.findall(r'"(3\.\d+)"', read(".github/workflows/ci.yml"))) <= set(installer().VERSIONS)
    assert f'requires-python = ">={installer().VERSIONS[0]}"' in read("pyproject.toml")


def test_the_conda_recipe_asks_for_what_the_package_asks_for() -> None:
    project = tomllib.loads(read("pyproject.toml"))["project"]
    conda = {"torch": "pytorch", "matplotlib": "matplotlib-base"}
    extras = [
        one for name in ("io", "compact", "sklearn", "onnx", "lab") for one in project["optional-dependencies"][name]
    ]
    wanted: dict[str, list[str]] = {}
    for one in [*project["dependencies"], *extras]:
        if "[" not in one:
            name, bound = one.split(">=")
            wanted.setdefault(conda.get(name, name), []).append(bound)
    recipe = read("release/conda/meta.yaml")
    given = dict(re.findall(r"^    - ([a-z0-9-]+) >=([\d.]+)$", recipe[recipe.index("  run:") :], flags=re.MULTILINE))
    assert given.pop("python") == project["requires-python"].removeprefix(">=")
    highest = {
        name: max(bounds, key=lambda bound: [int(n) for n in bound.split(".")]) for name, bounds in wanted.items()
    }
    assert given == highest
    pattern = re.search(r"regex_pattern='(.+)'", recipe)
    assert pattern is not None
    assert re.search(pattern[1], read("src/dropconnectpp/__init__.py"))[1] == dropconnectpp.__version__


def test_the_image_is_built_of_files_that_are_there_and_not_ignored() -> None:
    kept = {line[1:] for line in read(".dockerignore").splitlines() if line.startswith("!")}
    copied = set()
    for line in re.findall(r"^COPY (?!--from)(.+)$", read("release/docker/Dockerfile"), flags=re.MULTILINE):
        copied |= set(line.split()[:-1])
    assert copied == kept
    assert all((ROOT / name).exists() for name in copied)


# ------------------------------------------------------------------------------------------ the targets


def targets() -> set[str]:
    [line] = re.findall(r"^\.PHONY: (.+)$", read("Makefile"), flags=re.MULTILINE)
    return set(line.split())


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


@needs_make
def test_help_says_what_each_target_does(checkout: Path) -> None:
    shown = dict(re.findall(r"^make (\S+) +(\S.*)$", make("help", cwd=checkout), flags=re.MULTILINE))
    assert shown.keys() == targets()
    assert all(len(text) > 10 for text in shown.values())


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", ".github/workflows/ci.yml", ".ci/run", "docs/design.md"]
)
def test_targets_that_pages_and_ci_name_are_there(page: str) -> None:
    named = set(re.findall(r"(?:`|\$ |run: |^)make ([a-z-]+)", read(page), flags=re.MULTILINE))
    assert named <= targets()
    assert named or page == "docs/design.md"


def test_ci_calls_the_targets_for_every_python() -> None:
    workflow = read(".github/workflows/ci.yml")
    assert set(re.findall(r"run: make ([a-z-]+)", workflow)) == {"lint", "test", "test-ecosystem", "docs", "wheel"}
    for version in ("3.11", "3.12", "3.13"):
        assert f'"{version}"' in workflow
    for name in ("constraints.txt", "constraints-oldest.txt"):
        assert name in workflow
        assert (ROOT / name).exists()


@needs_make
def test_the_demo_installs_no_tools_of_developers(checkout: Path) -> None:
    planned = make("--dry-run", "demo", cwd=checkout)
    assert '".[lab]"' in planned
    assert "dcpp demo" in planned
    for extra in ("dev", "docs", "release"):
        assert f"[{extra}]" not in planned


@needs_make
@pytest.mark.parametrize(
    ("target", "extra"), [("demo", "lab"), ("test", "dev"), ("docs", "docs"), ("wheel", "release")]
)
def test_a_new_dependency_is_noticed(checkout: Path, target: str, extra: str) -> None:
    (checkout / ".venv").mkdir()
    for number, name in enumerate(("pyproject.toml", "constraints.txt")):
        os.utime(checkout / name, (1000 + number, 1000 + number))
    for number, stamp in enumerate(("torch", "lab", "dev", "docs", "release")):
        (checkout / ".venv" / f".ready-{stamp}").touch()
        os.utime(checkout / ".venv" / f".ready-{stamp}", (2000 + number, 2000 + number))
    assert f"[{extra}]" not in make("--dry-run", target, cwd=checkout).replace('$wheel[lab]"', "")
    os.utime(checkout / "pyproject.toml", (3000, 3000))
    planned = make("--dry-run", target, cwd=checkout)
    assert f'-e ".[{extra}]"' in planned
    assert "-m venv .venv" not in planned
    os.utime(checkout / "constraints.txt", (4000, 4000))
    assert "-m venv .venv" in make("--dry-run", target, cwd=checkout)


@needs_make
def test_clean_removes_all_that_the_targets_make(checkout: Path) -> None:
    ignored = [line for line in read(".gitignore").splitlines() if line and line not in OWNERS]
    assert len(ignored) > 10
    made = [pattern.strip("/").replace("*", "") for pattern in ignored]
    made += [".venv-oldest", ".coverage.host.1", "src/dropconnectpp.egg-info", "tests/lab/__pycache__"]
    made = [name for name in made if name != ".egg-info"]
    kept = {
        "src/code.py",
        *(f"{name.strip('/')}/mine" for name in OWNERS),
        "Makefile",
        "pyproject.toml",
        "constraints.txt",
    }
    for name in [*(f"{name}/made" for name in made), *kept]:
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).touch()
    make("clean", cwd=checkout)
    assert {p.relative_to(checkout).as_posix() for p in checkout.rglob("*") if p.is_file()} == kept


def test_hooks_run_what_lint_runs() -> None:
    [lint] = re.findall(r"^lint:.*\n((?:\t.*\n)+)", read("Makefile"), flags=re.MULTILINE)
    commands = [line.strip().removeprefix("$(BIN)/").removesuffix(" .") for line in lint.splitlines()]
    assert len(commands) == 4
    hooks = re.findall(r"entry: \.venv/bin/(.+)", read(".pre-commit-config.yaml"))
    assert [hook.replace(" --force-exclude", "") for hook in hooks] == commands


# -------------------------------------------------------------------------------------------- the pages


def test_the_examples_for_contributors_run(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", read("CONTRIBUTING.md"), flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4, "an estimator, a layer, a data set, a table"
    (tmp_path / "examples.py").write_text("\n".join(blocks), encoding="utf-8")
    python("-W", "error", str(tmp_path / "examples.py"), path=PACKAGE.parent, cwd=tmp_path)


@pytest.mark.parametrize("page", PAGES)
def test_links_and_files_that_pages_name_are_there(page: str) -> None:
    text = re.sub(r"^```.*?^```$", "", read(page), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)", text):
        assert (ROOT / target).exists(), f"{page} links to {target}"
    if page == "CONTRIBUTING.md":
        named = re.findall(r"`((?:src|tests|docs)/[\w./-]+)`", text)
        assert len(named) > 5
        for name in named:
            assert (ROOT / name).exists(), f"{page} names {name}"


def test_the_paper_is_cited_by_its_title_and_authors() -> None:
    citation = read("CITATION.cff")
    assert "title: Deep Network Regularization via Bayesian Inference of Synaptic Connectivity" in citation
    assert re.findall(r"family-names: (\w+)", citation) == ["Partaourides", "Chatzis"]

"""Install the built package where the repository cannot be seen: in a clean environment of every Python that is here.

    python tools/install_wheel.py dist          what `make wheel` runs

For each version from 3.11 on: a fresh environment gets the wheel alone, which must import; then the extra [lab], which
must run `dcpp demo`; then the sdist in the wheel's place. Versions of `VERSIONS` that are not here are named. Python
is looked for on the PATH, and among those of pyenv and uv.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
DEMO = ("demo", "--repeats", "2", "--epochs", "1", "--out", "demo")


def places() -> Iterator[Path]:
    """Folders that may hold a Python."""
    yield from map(Path, os.environ.get("PATH", "").split(os.pathsep))
    home = Path.home()
    managed = (
        Path(os.environ.get("PYENV_ROOT", home / ".pyenv")) / "versions",
        Path(os.environ.get("UV_PYTHON_INSTALL_DIR", home / ".local/share/uv/python")),
    )
    for folder in managed:
        yield from sorted(folder.glob("*/bin"), reverse=True)


def interpreters(versions: Iterable[str] = VERSIONS, folders: Iterable[Path] | None = None) -> dict[str, Path]:
    """The first Python of each version that answers as that version; a shim without one does not."""
    known = list(places() if folders is None else folders)
    found = {}
    for version in versions:
        for path in (folder / f"python{version}" for folder in known):
            if path.is_file() and says(path) == version:
                found[version] = path
                break
    return found


def says(path: Path) -> str:
    """The version that a Python says it has; empty if it does not start."""
    look = "import sys, venv; print('%d.%d' % sys.version_info[:2])"
    try:
        asked = subprocess.run([path, "-c", look], capture_output=True, text=True, timeout=60, check=False)
    except OSError:
        return ""
    return asked.stdout.strip() if asked.returncode == 0 else ""


def install(python: Path, wheel: Path, sdist: Path, constraints: Path, folder: Path) -> None:
    """Wheel, laboratory and sdist in one fresh environment; raises where a step fails."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def run(*command: str | Path) -> None:
        print("+", *command, flush=True)
        subprocess.run(command, cwd=folder, env=environment, check=True)

    run(python, "-m", "venv", folder / "venv")
    binaries = folder / "venv" / "bin"
    pip = (binaries / "pip", "install", "--quiet", "--disable-pip-version-check", "-c", constraints)
    run(*pip, wheel)
    run(
        binaries / "python",
        "-W",
        "error",
        "-c",
        "import dropconnectpp as dcpp, torch; dcpp.convert(torch.nn.Linear(3, 2))",
    )
    run(*pip, f"{wheel}[lab]")
    run(binaries / "pip", "check", "--disable-pip-version-check")
    run(binaries / "dcpp", *DEMO)
    if not (folder / "demo" / "index.html").stat().st_size:
        raise SystemExit("dcpp demo wrote an empty page.")
    run(*pip, "--no-deps", "--force-reinstall", sdist)
    run(binaries / "dcpp", "--version")


def main() -> None:
    """Try every Python that is here, and name those that are not."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("dist", type=Path, help="folder with one wheel and one sdist")
    options.add_argument("--constraints", type=Path, default=ROOT / "constraints.txt", help="versions to install")
    options.add_argument("--versions", nargs="+", default=VERSIONS, help=f"of Python (default: {' '.join(VERSIONS)})")
    given = options.parse_args()
    [wheel], [sdist] = (sorted(given.dist.resolve().glob(pattern)) for pattern in ("*.whl", "*.tar.gz"))
    found = interpreters(given.versions)
    for python in found.values():
        with tempfile.TemporaryDirectory() as folder:
            install(python, wheel, sdist, given.constraints.resolve(), Path(folder))
    missing = [version for version in given.versions if version not in found]
    print(f"Installed and run with Python {', '.join(found) or 'none'}.")
    if missing:
        print(f"Not here, and not tried: Python {', '.join(missing)}.")
    if not found:
        raise SystemExit("There is no Python to try.")


if __name__ == "__main__":
    main()

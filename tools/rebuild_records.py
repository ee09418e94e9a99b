"""Make every table and figure of the records again from their rows, and compare them with what is kept, byte for byte.

    python tools/rebuild_records.py                          all of them: some minutes
    python tools/rebuild_records.py noise kernels            those of two folders
    python tools/rebuild_records.py --only cifar10_late.md   one file
    python tools/rebuild_records.py noise --write            write what differs into records/

`records/tables.toml` names the command of each file; `--show` prints them, ready for a shell, and runs nothing. What a
benchmark measured, such as a time, cannot be made again. Of a compressed file the content is compared. A figure is
compared where matplotlib has the version that drew it; elsewhere the answer is `drawn`.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import importlib
import io
import os
import shlex
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "records"


@dataclass(frozen=True)
class Command:
    """What makes some files of a folder."""

    folder: str
    words: tuple[str, ...]
    """The tool and its options; OUT stands for the folder that is written to."""
    files: tuple[str, ...]

    def written_to(self, out: Path) -> list[str]:
        """The words with the folder in its place."""
        return [str(out) + word.removeprefix("OUT") if _is_output(word) else word for word in self.words]

    def shown(self) -> str:
        """A line for a shell in the root of the repository."""
        return shlex.join(["python", *self.written_to(Path("records") / self.folder)])

    def run(self, out: Path) -> None:
        """Write the files, in this process: loading torch takes longer than a table."""
        tool, *options = self.written_to(out)
        with _called_with([tool, *options]), contextlib.redirect_stdout(io.StringIO()):
            importlib.import_module(Path(tool).stem).main()


def _is_output(word: str) -> bool:
    return word == "OUT" or word.startswith("OUT/")


@contextlib.contextmanager
def _called_with(words: list[str]) -> Iterator[None]:
    """The program's words, folder and path to modules, as the tool's own process would have them."""
    before, folder, path = sys.argv, Path.cwd(), list(sys.path)
    sys.argv = words
    sys.path.insert(0, str(ROOT / "tools"))
    os.chdir(ROOT)
    try:
        yield
    finally:
        sys.argv = before
        sys.path[:] = path
        os.chdir(folder)


@dataclass(frozen=True)
class Plan:
    """What `records/tables.toml` says."""

    commands: tuple[Command, ...]
    measured: tuple[str, ...]
    """What a benchmark measured, as FOLDER/FILE."""
    matplotlib: str
    """The version that drew the figures: another draws other bytes."""


def plan() -> Plan:
    """Read `records/tables.toml`."""
    said: dict[str, Any] = tomllib.loads((RECORDS / "tables.toml").read_text())
    names, measured, version = (said.pop(name) for name in ("names", "measured", "matplotlib"))
    commands = (
        Command(folder, tuple(shlex.split(one["command"].format_map(names))), tuple(one["files"]))
        for folder, of_folder in said.items()
        for one in of_folder
    )
    return Plan(tuple(commands), tuple(measured), version)


def differing(command: Command, plan: Plan, out: Path) -> list[str]:
    """Make the files of a command; those that are not what is kept, or are not made at all."""
    command.run(out)
    return [
        file
        for file in command.files
        if comparable(file, plan) and content(out / file) != content(RECORDS / command.folder / file)
    ]


def comparable(file: str, plan: Plan) -> bool:
    """Whether this machine must make the same bytes."""
    return not file.endswith(".svg") or matplotlib.__version__ == plan.matplotlib


def content(path: Path) -> bytes | None:
    """The bytes of a file, unpacked: how well it is compressed depends on the library's version."""
    if not path.exists():
        return None
    written = path.read_bytes()
    return gzip.decompress(written) if path.suffix == ".gz" else written


def rebuild(commands: Sequence[Command], plan: Plan, write: bool) -> int:
    """Run the commands, say what differs, and return how many files do."""
    wrong = 0
    for command in commands:
        with tempfile.TemporaryDirectory() as folder:
            found = differing(command, plan, Path(folder))
            for file in command.files:
                state = "differs" if file in found else "same" if comparable(file, plan) else "drawn"
                print(f"{state:<8} {command.folder}/{file}", flush=True)
                if write and file in found and (Path(folder) / file).exists():
                    (RECORDS / command.folder / file).write_bytes((Path(folder) / file).read_bytes())
        wrong += len(found)
    return wrong


def main() -> None:
    """Rebuild and compare."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folders", nargs="*", metavar="FOLDER", help="of records/ (default: all)")
    options.add_argument("--only", nargs="+", default=[], metavar="FILE", help="the commands that make these files")
    options.add_argument("--write", action="store_true", help="write what differs into records/")
    options.add_argument("--show", action="store_true", help="print the commands and run nothing")
    given = options.parse_args()
    the_plan = plan()
    commands = the_plan.commands
    if unknown := set(given.folders) - {command.folder for command in commands}:
        options.error(f"nothing in {', '.join(sorted(unknown))} is made from rows; see records/tables.toml")
    if unknown := set(given.only) - {file for command in commands for file in command.files}:
        options.error(f"{', '.join(sorted(unknown))}: made from rows by no command of records/tables.toml")
    chosen = [
        command
        for command in commands
        if (not given.folders or command.folder in given.folders)
        and (not given.only or set(given.only) & set(command.files))
    ]
    if given.show:
        print(*(command.shown() for command in chosen), sep="\n")
        return
    if wrong := rebuild(chosen, the_plan, given.write):
        raise SystemExit(f"{wrong} files are not what their rows give.")


if __name__ == "__main__":
    main()

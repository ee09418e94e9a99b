"""Runs tests in several processes side by side: on a GPU machine most of their time goes to compiling kernels.

`make test-gpu JOBS=12` calls it with the files that have GPU tests. It needs nothing but pytest.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

PYTEST = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q"]


def collect(marker: str, files: list[str]) -> list[str]:
    """The tests' names, as pytest takes them."""
    command = [*PYTEST, "--collect-only", "-m", marker, *files]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        sys.exit(found.stdout + found.stderr)
    return [line for line in found.stdout.splitlines() if "::" in line]


def run(marker: str, names: list[str], jobs: int, folder: Path) -> tuple[Counter[str], list[str]]:
    """How many passed, failed and so on, and what the processes with failures printed."""
    processes = []
    for job in range(min(jobs, len(names))):
        log = (folder / f"{job}.log").open("w+")
        command = [*PYTEST, "-m", marker, *names[job::jobs]]
        processes.append((subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT), log))
    counts, failed = Counter[str](), []
    for process, log in processes:
        code = process.wait()
        log.seek(0)
        text = log.read()
        closing = text.splitlines()[-1] if text else ""
        told = re.findall(r"(\d+) (passed|failed|skipped|error)", closing)
        counts.update({kind: int(number) for number, kind in told})
        if code:
            failed.append(text)
    return counts, failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=4, help="processes at a time (default: 4)")
    parser.add_argument("-m", dest="marker", default="gpu", help="pytest's marker expression (default: gpu)")
    parser.add_argument("files", nargs="+")
    options = parser.parse_args()
    names = collect(options.marker, options.files)
    print(f"{len(names)} tests in {min(options.jobs, len(names))} processes", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        counts, failed = run(options.marker, names, options.jobs, Path(folder))
    print("\n".join(failed))
    print(f"{counts['passed']} passed, {counts['failed'] + counts['error']} failed, {counts['skipped']} skipped")
    if failed or sum(counts.values()) != len(names):
        sys.exit("Not every test ran and passed.")


if __name__ == "__main__":
    main()

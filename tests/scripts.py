"""Benchmarks and tools as a user calls them: in a process of their own or, where that takes long, in this one."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(script: str, *options: str) -> subprocess.CompletedProcess[str]:
    """`python SCRIPT OPTIONS` in the root of the repository."""
    source = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, script, *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def call(script: str, *options: str) -> subprocess.CompletedProcess[str]:
    """The same without a process: the script's `main` with these options."""
    out, errors, code = io.StringIO(), io.StringIO(), 0
    words, path = sys.argv, list(sys.path)
    sys.argv = [script, *options]
    sys.path.insert(0, str((ROOT / script).parent))
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors), contextlib.chdir(ROOT):
            importlib.import_module(Path(script).stem).main()
    except SystemExit as end:  # as Python does: a text goes to stderr
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            errors.write(end.code + "\n")
    finally:
        sys.argv = words
        sys.path[:] = path
    return subprocess.CompletedProcess(sys.argv, code, out.getvalue(), errors.getvalue())

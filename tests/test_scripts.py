"""Every benchmark and tool says what it is for and what each of its options does."""

from __future__ import annotations

import argparse
import ast

import pytest

from scripts import ROOT, call, run

PARTS = (
    *("deployment_networks", "deployment_timing", "deployment_training"),
    *("gradient_problem", "replica_comparators", "replica_stacks", "reporting"),
)
MODULES = {f"benchmarks/{name}.py" for name in PARTS}
"""What is imported and not run."""
SCRIPTS = sorted(
    {path.relative_to(ROOT).as_posix() for folder in ("benchmarks", "tools") for path in (ROOT / folder).glob("*.py")}
    - MODULES
)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_teaches(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parsers: list[argparse.ArgumentParser] = []
    made = argparse.ArgumentParser.__init__
    monkeypatch.setattr(
        argparse.ArgumentParser, "__init__", lambda self, *a, **k: (parsers.append(self), made(self, *a, **k))[1]
    )
    found = call(script, "--help")
    assert found.returncode == 0, found.stderr
    purpose = (ast.get_docstring(ast.parse((ROOT / script).read_text())) or "").splitlines()[0]
    assert found.stdout.partition("\n\n")[2].startswith(purpose), "the purpose comes first"
    assert f"python {script} " in found.stdout, "an example"
    assert parsers
    for parser in parsers:
        for action in parser._actions:
            assert action.help or isinstance(action, argparse._SubParsersAction), f"{action.dest} is not explained"


@pytest.mark.parametrize("script", ["benchmarks/mask_memory.py", "tools/list_settings.py"])
def test_a_script_starts_in_a_process_of_its_own(script: str) -> None:
    found = run(script, "--help")
    assert found.returncode == 0, found.stderr[-2000:]
    assert "--out" in found.stdout

"""Where Triton is not installed, every kernel's place is taken by its twin in plain torch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dropconnectpp.lab.kernels import compiled

NAMES = sorted(file.stem.removesuffix("_triton") for file in Path(compiled.__file__).parent.glob("*_triton.py"))


@pytest.mark.parametrize("name", NAMES)
def test_a_machine_without_triton_uses_the_twins(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, f"dropconnectpp.lab.kernels.{name}_triton", None)
    compiled.compiled.cache_clear()
    try:
        assert compiled.compiled(name) is None
    finally:
        compiled.compiled.cache_clear()

"""Where Triton is not installed, every kernel's place is taken by its twin in plain torch."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dropconnectpp.lab.kernels import support


def on_a_gpu(**other: Any) -> Any:
    """What kernels ask of a tensor; one on a GPU, made where there is none."""
    return SimpleNamespace(**{"is_cuda": True, "dtype": torch.float32, "is_contiguous": lambda: True, **other})


@pytest.fixture
def asked_again() -> Iterator[None]:
    """Forget what is known of Triton, before and after."""
    support.has_triton.cache_clear()
    yield
    support.has_triton.cache_clear()


@pytest.mark.triton
@pytest.mark.usefixtures("asked_again")
def test_kernels_take_float32_in_one_piece_on_a_gpu() -> None:
    assert support.supported(on_a_gpu(), None, on_a_gpu())
    assert not support.supported(on_a_gpu(), torch.zeros(3))
    assert not support.supported(on_a_gpu(dtype=torch.float64))
    assert not support.supported(on_a_gpu(is_contiguous=lambda: False))


@pytest.mark.usefixtures("asked_again")
def test_a_machine_without_triton_uses_the_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert not support.has_triton()
    assert not support.supported(on_a_gpu())


def test_no_argument_list_of_a_kernel_is_long() -> None:
    """What belongs together goes in records, those of `arguments`."""
    sources = sorted(Path(support.__file__).parent.glob("*_triton.py"))
    assert len(sources) == 13
    for source in sources:
        functions = [one for one in ast.parse(source.read_text()).body if isinstance(one, ast.FunctionDef)]
        lengths = {function.name: len(function.args.args) for function in functions}
        assert max(lengths.values()) <= 16, (source.name, lengths)


IMPORTED = """
import pkgutil, sys
if sys.argv[1] == "without":
    sys.modules["triton"] = None
import torch
from dropconnectpp import lab
modules = [found.name for found in pkgutil.walk_packages(lab.__path__, "dropconnectpp.lab.")]
for name in modules:
    if not name.endswith("_triton"):
        __import__(name)
from dropconnectpp.lab.kernels import adagrad, noise
from dropconnectpp.lab.philox import Stream
numbers = noise.draw_normal(Stream(1, "test"), torch.zeros(2, 5), torch.arange(2), 0)
adagrad.adagrad_all_([numbers], [torch.ones(2, 5)], [torch.zeros(2, 5)], [torch.ones(2)], 1e-6, True)
print(len(modules) > 50, sys.modules.get("triton") is None)
"""


@pytest.mark.parametrize("triton", ["with", "without"])
def test_the_laboratory_is_imported_and_computes_on_a_cpu_without_triton(
    triton: str, run_python: Callable[..., str]
) -> None:
    """Its import takes a quarter of a second or more, which nobody pays who has no use for it."""
    assert run_python(IMPORTED, triton).split() == ["True", "True"]

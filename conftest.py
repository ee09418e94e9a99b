"""Names that doctests may use, and one seed for every test."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch

import dropconnectpp

INTEGRATIONS = {"lightning": ("lightning",), "peft": ("peft",), "transformers": ("transformers", "pretrained")}
collect_ignore = [  # doctests import every module
    f"src/dropconnectpp/integrations/{module}.py"
    for package, modules in INTEGRATIONS.items()
    if find_spec(package) is None
    for module in modules
]

torch.set_num_threads(1)  # on tiny tensors a second thread costs more than it brings


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace: dict[str, Any]) -> None:
    doctest_namespace.update(torch=torch, dropconnectpp=dropconnectpp, dcpp=dropconnectpp)
    torch.manual_seed(20_240_607)

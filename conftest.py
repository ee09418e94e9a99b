"""Names that doctests may use, and one seed for every test."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dropconnectpp

torch.set_num_threads(1)  # on tiny tensors a second thread costs more than it brings


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace: dict[str, Any]) -> None:
    doctest_namespace.update(torch=torch, dropconnectpp=dropconnectpp, dcpp=dropconnectpp)
    torch.manual_seed(20_240_607)

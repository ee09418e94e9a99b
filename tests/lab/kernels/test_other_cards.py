"""The dense layer's kernels as they are launched, compiled for cards that are not there: they must fit the smallest."""

from __future__ import annotations

from collections.abc import Callable

import card_cases as cards
import pytest
import torch

from dropconnectpp.lab.tuning import candidates


@pytest.fixture
def compiled(run_compiled: Callable[..., str]) -> Callable[[str], list[str]]:
    """What code prints that compiles kernels; in a process of its own, since others interpret them."""
    return lambda code: run_compiled(f"import card_cases as cards; {code}").splitlines()


@pytest.mark.triton
@pytest.mark.parametrize("units", [64, 512])
def test_every_launch_fits_a_small_card(units: int, compiled: Callable[[str], list[str]]) -> None:
    names = list(cards.gates(torch.zeros(cards.REPLICAS, 1, 1)))
    lines = compiled(f"[cards.check(name, {units}) for name in {names!r}]")
    assert [line.split()[0] for line in lines] == ["2", "2", "3", "3", "2", "2", "2", "2"]


@pytest.mark.triton
@pytest.mark.parametrize("classes", [10, 100])
def test_the_head_fits_a_small_card(classes: int, compiled: Callable[[str], list[str]]) -> None:
    assert compiled(f"cards.check_head({classes})") == ["2 launches fit"] * 5


@pytest.mark.triton
def test_a_small_card_has_candidates_to_choose_from(compiled: Callable[[str], list[str]]) -> None:
    lines = compiled("cards.check_candidates()")
    for group, line in zip(candidates.GROUPS, lines, strict=True):
        name, fit, *_ = line.split()
        assert (name, int(fit) > len(group.changes) // 2) == (group.name, True), line

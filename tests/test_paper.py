"""docs/paper.md: every equation is there, and every function it names exists."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "paper.md").read_text()
ROWS = re.findall(r"^\| \((\d+)\) \|(.*)\|(.*)\|(.*)\|$", PAGE, flags=re.MULTILINE)
NAMES = sorted(set(re.findall(r"`(dropconnectpp(?:\.\w+)+)`", PAGE)))


def resolve(name: str) -> object:
    """The object behind a dotted name, the longest module prefix first."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: object = import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise ImportError(name)


def test_every_equation_is_there_once_and_names_a_function() -> None:
    assert [int(number) for number, *_ in ROWS] == list(range(1, 24))
    for number, _, library, laboratory in ROWS:
        assert re.search(r"`dropconnectpp\.(?!lab\.)", library), f"Eq. ({number}) names no function of the library"
        assert re.search(r"`dropconnectpp\.lab\.", laboratory), f"Eq. ({number}) names none of the laboratory"


@pytest.mark.parametrize("name", NAMES)
def test_every_function_named_exists_and_is_documented(name: str) -> None:
    found = resolve(name)
    assert callable(found)
    assert found.__doc__


def test_a_wrong_name_would_be_caught() -> None:
    with pytest.raises(AttributeError):
        resolve("dropconnectpp.functional.no_such_function")


def test_the_code_cites_each_equation() -> None:
    source = "\n".join(p.read_text() for p in (Path(__file__).parents[1] / "src").rglob("*.py"))
    cited: set[int] = set()
    for first, last in re.findall(r"Eq\. \((\d+)\)(?:[-–]\((\d+)\))?", source):
        cited.update(range(int(first), int(last or first) + 1))
    for extra in re.findall(r"Eq\. \(\d+\), \((\d+)\)", source):
        cited.add(int(extra))
    # (3), (4) and (5) are the general identities that the others rest on.
    assert set(range(1, 24)) - cited <= {3, 4, 5}

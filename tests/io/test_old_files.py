"""Files that earlier versions wrote still open, and hold what was saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dropconnectpp as dcpp
from dropconnectpp.layers.base import masked_layers
from saved_cases import GOLDEN, same_state

FILES = sorted((Path(__file__).parent / "golden").glob("*.safetensors"))


def test_there_are_files_of_every_format() -> None:
    names = {file.stem.rpartition("-")[0] for file in FILES}
    assert names == {"before-0.1.0", "0.1.0", "format-1", "format-2"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_of_an_earlier_version_holds_what_was_saved(file: Path) -> None:
    make, architecture = GOLDEN[file.stem.rpartition("-")[2]]
    saved, loaded = make(), dcpp.load(file, architecture())
    if file.stem == "format-2-pruned":
        assert torch.equal(saved[4].weight_kept, loaded[4].weight_kept)
        assert torch.equal(saved[4].weight * saved[4].weight_kept, loaded[4].weight)
    else:
        assert same_state(saved, loaded)
    before, after = masked_layers(saved), masked_layers(loaded)
    assert before.keys() == after.keys()
    for ours, theirs in zip(before.values(), after.values(), strict=True):
        assert type(ours) is type(theirs)
        left, right = ours.options(), theirs.options()
        assert repr(left.pop("activation")) == repr(right.pop("activation"))
        assert left == right
    x = torch.randn(2, 1, 4, 4) if "tied" not in file.stem else torch.randn(2, 3)
    assert torch.equal(saved.eval()(x), loaded.eval()(x))
    if "tied" in file.stem:
        assert loaded[0].weight_logit is loaded[1].weight_logit

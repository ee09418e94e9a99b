"""The sparse wide residual network, in small: crops and flips, the size that is published, the methods, going on."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from benchmark_cases import tables

from scripts import ROOT

OPTIONS = ("--images", "128", "--depth", "10", "--width", "1", "--epochs", "10", "--eager", "--sparsity", "0.75")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("wide_resnet")


def test_every_method_is_trained_and_finished_networks_stay(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    (found,) = tables("benchmarks/wide_resnet.py", tmp_path, *OPTIONS, "--repeats", "1", "--rows", str(rows)).values()
    assert [row["method"] for row in found] == ["dense", "SparsityPlan", "gradual magnitude"]
    assert found[2]["kept"] == "25.00% to 25.00%"
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    options = ("--repeats", "2", "--rows", str(rows), "--seconds", "0")
    (again,) = tables("benchmarks/wide_resnet.py", tmp_path, *OPTIONS, *options).values()
    assert again == found, "nothing is trained twice, and without time nothing more"
    (other,) = tables("benchmarks/wide_resnet.py", tmp_path, *OPTIONS, *options, "--noise", "0.1").values()
    assert not other, "networks of other settings are not shown"
    assert len(lines) == len(rows.read_text().splitlines()) == 3


def test_crops_and_flips_are_windows_of_the_padded_images(script: ModuleType) -> None:
    images = script.read_images(None, 16, "cpu")
    x, labels = images.batch(torch.arange(16), torch.Generator().manual_seed(0))
    raw = (x * images.deviation + images.mean).round()
    flips = 0
    for image, padded in zip(raw, images.train.float(), strict=True):
        windows = padded.unfold(1, 32, 1).unfold(2, 32, 1).permute(1, 2, 0, 3, 4).flatten(0, 1)
        same, flipped = ((windows == one).all((1, 2, 3)).any() for one in (image, image.flip(2)))
        assert same or flipped
        flips += int(flipped)
    assert 0 < flips < 16
    assert torch.equal(labels, images.labels)


def test_it_is_the_published_network(script: ModuleType) -> None:
    model = script.wide_resnet(22, 2)
    maps, count = 16, 16 * 3 * 9
    for outputs in (32, 64, 128):
        count += 9 * outputs * (maps + 5 * outputs) + maps * outputs
        maps = outputs
    assert sum(weight.numel() for weight in script.weights_of(model)) == count + 128 * 10
    assert sum(isinstance(layer, torch.nn.Conv2d) for layer in model.modules()) == 1 + 2 * 9 + 3
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)

"""The networks that `deployment.py` measures: how they are built, stored and read again.

Each is a plain network with zeros where connections were removed, in a folder as `NAME.safetensors`, with `NAME.json`
beside it: how it was made, its test error and, for networks with fewer units from the start, how many.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

import dropconnectpp as dcpp


@dataclass(frozen=True)
class Trained:
    """A network and what is known of it."""

    name: str
    model: nn.Module
    made: str
    """How, in words."""
    error: float | None = None
    """Percent of the test images."""
    dense_error: float | None = None
    """Of the dense network, trained as long."""
    units: list[int] = field(default_factory=list)
    """For networks whose layers are smaller than usual."""

    def write(self, folder: Path) -> None:
        """Both files, values as float16: the network that is read again is the rounded one."""
        dcpp.save(self.model, folder / f"{self.name}.safetensors", dtype=torch.float16)
        said = {key: value for key, value in vars(self).items() if key not in ("name", "model")}
        (folder / f"{self.name}.json").write_text(json.dumps(said, indent=1) + "\n")


def lenet_300_100(units: tuple[int, ...] = (300, 100)) -> nn.Sequential:
    """Two hidden layers on 28 x 28 images."""
    first, second = units[:2]
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, first), nn.ReLU(), nn.Linear(first, second), nn.ReLU(), nn.Linear(second, 10)
    )


def lenet_5_caffe(units: tuple[int, ...] = (20, 50, 500)) -> nn.Sequential:
    """Caffe's LeNet-5, with a ReLU after each convolution as in the papers on sparsity."""
    first, second, third = units[:3]
    return nn.Sequential(
        *(nn.Conv2d(1, first, 5), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Conv2d(first, second, 5), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(16 * second, third), nn.ReLU(), nn.Linear(third, 10)),
    )


def paper_network() -> nn.Sequential:
    """The paper's network for CIFAR-10: 4,096 x 64 weights in its dense layer."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True)),
        *(nn.Conv2d(32, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True)),
        *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(4096, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


WIDTH, HEADS, HIDDEN, TOKENS = 320, 10, 1280, 16
"""Of the encoder: 70% of its heads and of its hidden units are whole numbers."""


def encoder() -> nn.TransformerEncoder:
    """Four blocks of a transformer's encoder, on sequences of 16 tokens."""
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(block, 4, enable_nested_tensor=False).eval()


@torch.no_grad()
def thin_encoder(share: float = 0.7) -> Trained:
    """The encoder with fresh weights, and in each block the smallest heads and hidden units switched off."""
    model = encoder()
    for block in model.layers:
        attention, size = block.self_attn, WIDTH // HEADS
        heads = attention.out_proj.weight.view(WIDTH, HEADS, size).norm(dim=(0, 2))
        off = torch.zeros(HEADS, dtype=torch.bool)
        off[heads.argsort()[: round(share * HEADS)]] = True
        rows = off.repeat_interleave(size)
        attention.out_proj.weight[:, rows] = 0.0
        attention.in_proj_weight[rows.repeat(3)] = 0.0
        hidden = block.linear1.weight.norm(dim=1).argsort()[: round(share * HIDDEN)]
        block.linear1.weight[hidden] = 0.0
        block.linear1.bias[hidden] = 0.0
        block.linear2.weight[:, hidden] = 0.0
    return Trained("encoder", model, f"fresh weights; {share:.0%} of heads and hidden units switched off by size")


BUILD: dict[str, Callable[..., nn.Module]] = {
    "lenet-300-100": lenet_300_100,
    "lenet-5-caffe": lenet_5_caffe,
    "paper-cifar10": paper_network,
    "encoder": encoder,
}
INPUTS = {
    "lenet-300-100": (1, 28, 28),
    "lenet-5-caffe": (1, 28, 28),
    "paper-cifar10": (3, 32, 32),
    "encoder": (TOKENS, WIDTH),
}
"""The shape of one example."""
GROUPS, TORCH_PRUNING = "-groups", "-torch-pruning"
"""What follows the name of a network that was made small in another way."""


def family(name: str) -> str:
    """The network in its usual size."""
    return name.removesuffix(TORCH_PRUNING).removesuffix(GROUPS)


def build(name: str, units: list[int]) -> nn.Module:
    """The network with fresh weights."""
    made = BUILD[family(name)]
    return (made(tuple(units)) if units else made()).eval()


def read(folder: Path, name: str) -> Trained | None:
    """A network from its files; None where they are not."""
    if name == "encoder":
        return thin_encoder()
    file = folder / f"{name}.json"
    if not file.exists():
        return None
    said = json.loads(file.read_text())
    return Trained(name, dcpp.load(folder / f"{name}.safetensors", build(name, said["units"])).eval(), **said)


def weights_of(model: nn.Module) -> list[Tensor]:
    """The weights of the layers, biases and statistics left out."""
    return [parameter for parameter in model.parameters() if parameter.ndim > 1]


def share_of(model: nn.Module) -> float:
    """How many of the weights are not zero."""
    weights = weights_of(model)
    return sum(int((w != 0).sum()) for w in weights) / sum(w.numel() for w in weights)

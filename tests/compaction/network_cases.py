"""Networks whose layers are coupled, and connections taken out of them at random."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Module):
    """Two convolutions around which the input goes."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.first_norm(self.first(x)))
        return F.relu(x + self.second_norm(self.second(inner)))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(Residual(8), Residual(8))
        self.wider = nn.Conv2d(8, 12, 3, stride=2, padding_mode="circular", padding=1)
        self.shortcut = nn.Conv2d(8, 12, 1, stride=2)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.stem(x)))
        x = torch.sigmoid(self.wider(x)) + self.shortcut(x)
        return self.head(x.mean((2, 3)))


class Concatenating(nn.Module):
    """Branches put side by side, a depthwise convolution, a flattening."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Conv2d(3, 6, 3)
        self.right = nn.Conv2d(3, 4, 3)
        self.depthwise = nn.Conv2d(16, 16, 3, groups=16)
        self.hidden = nn.Linear(16 * 4, 12)
        self.out = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        left, right = torch.tanh(self.left(x)), F.leaky_relu(self.right(x))
        x = self.depthwise(torch.cat([left, right, left], 1))
        x = torch.flatten(F.max_pool2d(x, 2), 1)
        return self.out(F.gelu(self.hidden(x)))


class Signals(nn.Module):
    """One-dimensional, with a view in place of a flattening."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(2, 6, 3)
        self.norm = nn.BatchNorm1d(6)
        self.second = nn.Conv1d(6, 8, 3, groups=2)
        self.out = nn.Linear(8 * 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(F.silu(self.norm(self.first(x))))
        return self.out(x.view(x.shape[0], -1))


class Volumes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv3d(1, 5, 3)
        self.second = nn.Conv3d(5, 4, 3)
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.avg_pool3d(F.relu(self.second(torch.sigmoid(self.first(x)))), 2)
        return self.out(x.flatten(1))


class Encoder(nn.Module):
    """Tokens, two blocks of a transformer, the mean over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 24, batch_first=True, activation="gelu")
        self.blocks = nn.TransformerEncoder(layer, 2)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.blocks(self.tokens(x)).mean(1))


CASES: dict[str, tuple[type[nn.Module], Tensor]] = {
    "residual sums": (ResNet, torch.randn(4, 3, 8, 8)),
    "concatenation": (Concatenating, torch.randn(4, 3, 8, 8)),
    "signals": (Signals, torch.randn(4, 2, 8)),
    "volumes": (Volumes, torch.randn(3, 1, 6, 6, 6)),
    "transformer": (Encoder, torch.randint(0, 11, (4, 6))),
}


def settled(make: type[nn.Module], x: Tensor) -> nn.Module:
    """A network with statistics of its own, in eval mode and double precision."""
    model = make().double().train()
    for _ in range(3):
        model(x.double() if x.is_floating_point() else x)
    return model.eval()


@torch.no_grad()
def switch_off(model: nn.Module, share: float, generator: torch.Generator) -> None:
    """Take rows and columns out of random layers, and some biases with them."""
    for module in model.modules():
        if not isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            continue
        rows = torch.rand(module.weight.shape[0], generator=generator) < share
        columns = torch.rand(module.weight.shape[1], generator=generator) < share
        module.weight[rows] = 0.0
        module.weight[:, columns] = 0.0
        if module.bias is not None and torch.rand((), generator=generator) < 0.5:
            module.bias[rows] = 0.0

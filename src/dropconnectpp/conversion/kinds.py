"""Which layer each plain one becomes: a table that others may add to."""

from __future__ import annotations

from typing import Any

from torch import nn

from dropconnectpp.layers import public as kinds

CONVERTED: dict[str, dict[type[nn.Module], type[Any]]] = {
    "dropconnect++": {
        nn.Linear: kinds.DropConnectPPLinear,
        nn.Conv1d: kinds.DropConnectPPConv1d,
        nn.Conv2d: kinds.DropConnectPPConv2d,
        nn.Conv3d: kinds.DropConnectPPConv3d,
    },
    "dropconnect": {
        nn.Linear: kinds.DropConnectLinear,
        nn.Conv1d: kinds.DropConnectConv1d,
        nn.Conv2d: kinds.DropConnectConv2d,
        nn.Conv3d: kinds.DropConnectConv3d,
    },
}
"""Which layer each plain one becomes."""


def plain_layers() -> tuple[type[nn.Module], ...]:
    """The types that become layers of ours, of whatever kind."""
    return tuple({plain: None for table in CONVERTED.values() for plain in table})

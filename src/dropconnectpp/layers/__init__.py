"""The layers: the eight that users name, and what they are made of."""

from dropconnectpp.layers.public import (
    DropConnectConv1d,
    DropConnectConv2d,
    DropConnectConv3d,
    DropConnectLinear,
    DropConnectPPConv1d,
    DropConnectPPConv2d,
    DropConnectPPConv3d,
    DropConnectPPLinear,
)

__all__ = [
    "DropConnectConv1d",
    "DropConnectConv2d",
    "DropConnectConv3d",
    "DropConnectLinear",
    "DropConnectPPConv1d",
    "DropConnectPPConv2d",
    "DropConnectPPConv3d",
    "DropConnectPPLinear",
]

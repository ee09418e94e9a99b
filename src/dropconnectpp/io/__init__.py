"""Saving, loading and deploying: safetensors with the layer options inside, and ONNX."""

from dropconnectpp.io.loading import load
from dropconnectpp.io.onnx import to_onnx
from dropconnectpp.io.saving import save

__all__ = ["load", "save", "to_onnx"]

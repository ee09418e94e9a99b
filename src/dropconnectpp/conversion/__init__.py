"""A plain model's layers become ours, and back."""

from dropconnectpp.conversion.converting import convert
from dropconnectpp.conversion.covered import coverage
from dropconnectpp.conversion.dense import as_module, plain_state_dict, to_dense
from dropconnectpp.conversion.kinds import CONVERTED
from dropconnectpp.conversion.making import host_replacement_of, replacement_of
from dropconnectpp.conversion.swapping import swap

__all__ = [
    "CONVERTED",
    "as_module",
    "convert",
    "coverage",
    "host_replacement_of",
    "plain_state_dict",
    "replacement_of",
    "swap",
    "to_dense",
]

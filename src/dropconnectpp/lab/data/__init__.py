"""Data sets: the paper's four, an embedded one, and anybody's own pictures, as uint8 arrays.

`load("cifar10")` opens what `fetch` prepared; `load("fashion-mini")` needs nothing;
`load("folder:PATH")` reads a folder of pictures. Nothing here imports torch but `normalisation`.
"""

from dropconnectpp.lab.data.access import fetch, is_ready, load, verify, where
from dropconnectpp.lab.data.cache import data_directory
from dropconnectpp.lab.data.catalogue import CATALOGUE, Entry
from dropconnectpp.lab.data.dataset import DataError, Dataset, Provenance, Split

__all__ = [
    "CATALOGUE",
    "DataError",
    "Dataset",
    "Entry",
    "Provenance",
    "Split",
    "data_directory",
    "fetch",
    "is_ready",
    "load",
    "verify",
    "where",
]

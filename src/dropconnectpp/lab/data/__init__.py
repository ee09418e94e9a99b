"""Data sets as uint8 arrays: the paper's four, one that comes with the package, and a folder of your own images.

`load("cifar10")` opens what `fetch` prepared; `load("fashion-mini")` needs no download; `load("folder:PATH")` reads a
folder of images. Only `normalisation` imports torch.
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

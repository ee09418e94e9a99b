"""Downloads that resume: the bytes received so far stay in a `.part` file until the whole file is there."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dropconnectpp.lab.data.dataset import DataError

ProgressCallback = Callable[[str, int, int | None], None]
"""Called with the current step, how much of it is done and, where known, how much there is."""

STEP = 2**16
SIZE_LIMIT = 2_000_000_000
ATTEMPTS = 4
PAUSE_S = 0.5
TIMEOUT_S = 30.0


def silent(what: str, done: int, total: int | None) -> None:
    """A `ProgressCallback` that shows nothing."""


def download(url: str, folder: Path, name: str, checksum: str | None, progress: ProgressCallback = silent) -> Path:
    """Download one file into ``folder``, unless it is there; with ``checksum``, `md5:…` or `sha256:…`, check it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    if path.exists() and _agrees(path, checksum):
        return path
    part = folder / f"{name}.part"
    validator = part.with_suffix(".validator")
    resumed = part.exists()
    agrees = resumed and checksum is not None and _agrees(part, checksum)  # killed when all was there
    if not agrees:
        fetch = ResumingDownload(part, validator, name, progress)
        fetch(url)
        agrees = _agrees(part, checksum)
        if resumed and not agrees:  # what was there may have been damaged
            part.unlink()
            fetch(url)
            agrees = _agrees(part, checksum)
    validator.unlink(missing_ok=True)
    if not agrees:
        part.unlink()
        raise DataError(
            f"{url}: what arrived does not have the official checksum {checksum} and was deleted. Try again; if "
            "it happens again, give the files with --from PATH."
        )
    os.replace(part, path)
    return path


def _agrees(path: Path, checksum: str | None) -> bool:
    if checksum is None:
        return True
    algorithm, _, expected = checksum.partition(":")
    state = hashlib.new(algorithm, usedforsecurity=False)
    with path.open("rb") as file:
        while piece := file.read(STEP):
            state.update(piece)
    return state.hexdigest() == expected


class ResumingDownload:
    """Downloads into a file of its own, and goes on with what an interrupted download left there."""

    def __init__(self, part: Path, validator: Path, name: str, progress: ProgressCallback) -> None:
        self.part, self.name, self.progress = part, name, progress
        self.validator = validator  # the ETag, so that two versions are never mixed

    def __call__(self, url: str) -> None:
        """Download all of ``url``, in several attempts if the connection fails."""
        try:
            import requests
        except ImportError as error:
            raise DataError("Downloading needs requests. Install it with: pip install 'dropconnectpp[lab]'") from error
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self._once(url)
                return
            except requests.HTTPError as error:
                raise DataError(f"{url}: the server answered {error}. {_OTHER_WAYS}") from error
            except (requests.RequestException, OSError) as error:
                if isinstance(error, OSError) and not isinstance(error, requests.RequestException):
                    raise DataError(
                        f"{self.part}: cannot be written ({error}). Free some space and try again."
                    ) from error
                if attempt == ATTEMPTS:
                    raise DataError(
                        f"{url}: the connection failed {ATTEMPTS} times, last with: {error}. What arrived is kept; "
                        f"the same command resumes from there. {_OTHER_WAYS}"
                    ) from error
                time.sleep(PAUSE_S * 2**attempt)

    def _once(self, url: str) -> None:
        import requests

        have = self.part.stat().st_size if self.part.exists() else 0
        headers = {"Accept-Encoding": "identity"}  # else a .gz file might be unpacked on the way
        if have and self.validator.exists():
            headers |= {"Range": f"bytes={have}-", "If-Range": self.validator.read_text()}
        with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT_S) as response:
            if response.status_code == requests.codes.requested_range_not_satisfiable:
                self.part.unlink(missing_ok=True)
                raise requests.ConnectionError("the file is not as long as what arrived before; it is begun anew")
            response.raise_for_status()
            resumed = response.status_code == 206 and _starts_at(response, have)
            have = have if resumed else 0
            length = response.headers.get("Content-Length", "")
            total = have + int(length) if length.isdigit() else None
            if (total or 0) > SIZE_LIMIT:
                raise DataError(f"{url}: announces {total:,} bytes, more than any data set in the catalogue has.")
            if not resumed:
                self.part.unlink(missing_ok=True)
                self.validator.unlink(missing_ok=True)
                if etag := response.headers.get("ETag", ""):
                    self.validator.write_text(etag)
            response.raw.enforce_content_length = False  # else the last piece before a break would be lost
            with self.part.open("ab") as file:
                for piece in response.iter_content(STEP):
                    have += file.write(piece)
                    if have > SIZE_LIMIT:
                        raise DataError(f"{url}: sent more than {SIZE_LIMIT:,} bytes; the download was stopped.")
                    self.progress(self.name, have, total)
        if total is not None and have < total:
            raise requests.ConnectionError(f"{have:,} of {total:,} bytes arrived")


_OTHER_WAYS = "If you already have the files, give them with --from PATH."


def _starts_at(response: Any, offset: int) -> bool:
    return str(response.headers.get("Content-Range", "")).startswith(f"bytes {offset}-")

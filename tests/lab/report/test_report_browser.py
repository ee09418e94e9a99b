"""The page in a real browser: sorting, protocols, colours, no error, nothing cut off on a phone.

Chromium is driven by its own protocol through a pair of pipes, so that no package is needed for it. To look at the
screenshots: `DCPP_SCREENSHOTS=/tmp/shots pytest tests/lab/report/test_report_browser.py`.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report_cases import fill_set

from dropconnectpp.lab.report import build
from dropconnectpp.lab.runs.store import Store

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"),
    *("--disable-extensions", "--no-first-run", "--hide-scrollbars", "--disable-dev-shm-usage"),
    "--remote-debugging-pipe",
]
LAUNCH = """
import os, sys
os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
PHONE, DESKTOP = 390, 1280


class Browser:
    """One tab."""

    def __init__(self, profile: Path) -> None:
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_read, to_write)]  # out of the way of 3 and 4
        launch = [sys.executable, "-c", LAUNCH, *map(str, ends), str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}"]
        self.process = subprocess.Popen(
            [*launch, "about:blank"], pass_fds=ends, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for end in (to_read, to_write, *ends):
            os.close(end)
        self._rest, self._number, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self._session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")

    def __call__(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the browser's protocol."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self._number:
                assert "error" not in found, found
                result: dict[str, Any] = found["result"]
                return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._read, 1 << 20)
            assert part, "the browser is gone"
            self._rest += part
        message, self._rest = self._rest.split(b"\0", 1)
        found: dict[str, Any] = json.loads(message)
        if "method" in found:
            self.events.append(found)
        return found

    def wait(self, event: str) -> None:
        """Until the event has come since the last `open`."""
        while not any(found["method"] == event for found in self.events):
            self._next()

    def open(self, page: Path, *, width: int = DESKTOP, dark: bool = False, scripts: bool = True) -> None:
        """Load a page anew in a window of that width."""
        self("Emulation.setScriptExecutionDisabled", value=not scripts)
        self("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else ""}])
        self("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500)
        for address in ("about:blank", page.as_uri()):
            self.events.clear()
            self("Page.navigate", url=address)
            self.wait("Page.loadEventFired")

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        found = self("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, key: str, code: int, text: str = "") -> None:
        """A key of the keyboard."""
        for kind in ("keyDown", "keyUp"):
            given = {"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code}
            self("Input.dispatchKeyEvent", **given, **({"text": text} if text and kind == "keyDown" else {}))

    def click(self, selector: str) -> None:
        """A click of the mouse on the middle of an element."""
        box = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({block: 'center'}); const r = e.getClientRects()[0];"
            " return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def screenshot(self, name: str) -> bytes:
        """The whole page as PNG; kept in the folder DCPP_SCREENSHOTS, if there is one."""
        found = self("Page.captureScreenshot", captureBeyondViewport=True)
        content = base64.b64decode(found["data"])
        if folder := os.environ.get("DCPP_SCREENSHOTS"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            (Path(folder) / f"{name}.png").write_bytes(content)
        return content

    def errors(self) -> list[dict[str, Any]]:
        """What went wrong on the page since it was opened: exceptions, console, the security policy, requests."""
        self.run("1")
        bad = [e for e in self.events if e["method"] in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled")]
        bad += [e for e in self.events if e["method"] == "Log.entryAdded"]
        sent = [e for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return bad + [e for e in sent if not e["params"]["request"]["url"].startswith("file:")]

    def close(self) -> None:
        self._session = ""
        self("Browser.close")
        self.process.wait(timeout=20)
        os.close(self._read)
        os.close(self._write)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    with Store.open(folder / "results.sqlite") as store:
        fill_set(store)
        fill_set(store, "svhn", ["dropout", "dropconnect++"])
    return build(folder / "results.sqlite", folder / "site", command="dcpp run table1", figures=False)


TABLE = "document.querySelectorAll('#accuracy table')[1]"


def groups(browser: Browser, place: int = 0) -> list[list[str]]:
    """A column of Table 1 as it stands on the page, group by group, each with its heading."""
    cells = f"[...body.rows].map((row) => (row.cells[{place}] || row.cells[0]).innerText)"
    found: list[list[str]] = browser.run(f"[...{TABLE}.tBodies].map((body) => {cells})")
    return found


def test_a_click_sorts_within_the_groups_by_number(browser: Browser, page: Path) -> None:
    browser.open(page)
    before = groups(browser, 1)
    assert before[0] == ["CIFAR-10", "74.45", "75.55", "76.10", "77.20"]
    head = "#accuracy .table:nth-of-type(2) thead th:nth-child(2)"
    browser.click(f"{head} button")
    browser.click(f"{head} button")
    assert browser.run(f"document.querySelector({head!r}).getAttribute('aria-sort')") == "descending"
    after = groups(browser, 1)
    assert after == [["CIFAR-10", "77.20", "76.10", "75.55", "74.45"], ["SVHN", "77.20", "75.55"]]
    assert groups(browser)[0][1] == "DropConnect++"  # whole rows move
    browser.click(f"{head} button")
    assert groups(browser, 1) == before
    assert not browser.run(f"document.querySelector({head!r}).hasAttribute('aria-sort')")
    assert not browser.errors()


def test_the_keyboard_sorts_and_what_is_missing_comes_last(browser: Browser, page: Path) -> None:
    browser.open(page)
    rows = "[...document.querySelectorAll('#samples tbody')[0].rows].map((row) => row.cells[0].innerText)"
    assert browser.run(rows)[1:] == ["1", "30", "500", "Eq. (19)"]
    browser.run("document.querySelector('#samples thead button').focus()")
    browser.press("Enter", 13, "\r")
    browser.press(" ", 32, " ")
    assert browser.run("document.querySelector('#samples thead th').getAttribute('aria-sort')") == "descending"
    assert browser.run(rows)[1:] == ["500", "30", "1", "Eq. (19)"]
    assert not browser.errors()


def test_a_method_leads_to_its_protocol_which_opens(browser: Browser, page: Path) -> None:
    for scripts in (True, False):
        browser.open(page, scripts=scripts)
        link = "#accuracy .table:nth-of-type(2) tbody tr:nth-child(3) a"
        details = f"document.querySelector(document.querySelector({link!r}).getAttribute('href')).closest('details')"
        assert not browser.run(f"{details}.open")
        browser.click(link)
        browser.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))") if scripts else 0
        assert browser.run(f"{details}.open")
        assert browser.run(f"{details}.querySelector('summary').innerText") == "Dropout on CIFAR-10"
        top = browser.run(f"{details}.getBoundingClientRect().top")
        assert -200 < top < 900
    browser.open(page)
    browser.run(f"{details}.open = true, {details}.open = false, document.querySelector({link!r}).click()")
    browser.run("new Promise((done) => setTimeout(done, 50))")
    assert browser.run(f"{details}.open")


def test_colours_follow_the_system_until_the_button_is_used(browser: Browser, page: Path) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    series = "getComputedStyle(document.documentElement).getPropertyValue('--series-4').trim()"
    light, dark = "rgb(253, 253, 251)", "rgb(22, 25, 28)"
    browser.open(page, dark=True)
    assert (browser.run(ground), browser.run(series)) == (dark, "#f0776c")
    browser.open(page)
    assert (browser.run(ground), browser.run(series)) == (light, "#b8322a")
    assert browser.run("document.getElementById('theme').getAttribute('aria-label')") == "Show in dark colours"
    browser.click("#theme")
    assert (browser.run(ground), browser.run(series)) == (dark, "#f0776c")
    assert len(browser.screenshot("dark")) > 10_000
    browser.open(page)
    assert browser.run(ground) == dark  # remembered
    browser.click("#theme")
    assert browser.run(ground) == light
    assert not browser.errors()
    browser.run("localStorage.clear()")


def test_the_page_serves_without_scripts(browser: Browser, page: Path) -> None:
    browser.open(page, scripts=False)
    assert browser.run("document.querySelectorAll('thead button').length") == 0
    assert browser.run("getComputedStyle(document.getElementById('theme')).display") == "none"
    assert groups(browser, 1)[1] == ["SVHN", "75.55", "77.20"]


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_tables_scroll_in_their_own_box(browser: Browser, page: Path, width: int) -> None:
    browser.open(page, width=width)
    assert browser.run("document.documentElement.scrollWidth") == width
    wide = "[...document.querySelectorAll('.scroll')].filter((box) => box.scrollWidth > box.clientWidth).length"
    assert (browser.run(wide) > 0) == (width == PHONE)
    browser.run("document.querySelectorAll('details').forEach((one) => one.open = true)")
    assert browser.run("document.documentElement.scrollWidth") == width
    browser.run("document.querySelectorAll('details').forEach((one) => one.open = false)")
    assert len(browser.screenshot(f"{width}")) > 50_000
    assert not browser.errors()


def test_nothing_but_the_pages_own_script_runs(browser: Browser, page: Path) -> None:
    browser.open(page)
    for attack in ("s.textContent = 'window.hit = 1'", "s.src = 'data:text/javascript,window.hit=1'"):
        browser.run(f"(() => {{ const s = document.createElement('script'); {attack}; document.body.append(s); }})()")
    browser.run("new Promise((done) => setTimeout(done, 50))")
    assert browser.run("window.hit") is None
    assert any("Content Security Policy" in str(event) for event in browser.errors())

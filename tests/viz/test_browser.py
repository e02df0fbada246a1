"""The player and the page in a real browser: Chromium without a window, driven by Selenium.

    make test-browser

Skipped with a reason where Chromium, its driver or Selenium is not installed. On Debian:
``apt-get install chromium chromium-driver``; Selenium is the extra ``browser`` of this package.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from viz.ghost_logs import ghost_log

from mamba_teach.viz.board_html import board_page

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
DRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--window-size=1400,1400",
)  # fmt: skip
TOKEN = "board"
PATIENCE = 90  # seconds, for a slow machine; usually a few are enough
CELL = """\
from mamba_teach import Engine, EngineConfig, GhostModel, SamplingParams
from mamba_teach.viz.player import BoardPlayer
config = EngineConfig(block_size=4, max_model_len=64, max_num_seqs=4, num_blocks=40)
engine = Engine(GhostModel("MM*M"), config)
shared = list(range(14))
_ = engine.generate([shared], SamplingParams(max_tokens=3))
_ = engine.generate([shared + [50 + i] * 4 for i in range(3)], SamplingParams(max_tokens=6))
BoardPlayer(engine.events)"""

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium here (apt-get install chromium)"),
    pytest.mark.skipif(DRIVER is None, reason="no chromedriver (apt-get install chromium-driver)"),
]


@pytest.fixture
def browser() -> Iterator[Any]:
    pytest.importorskip("selenium", reason="no selenium here (pip install 'mamba_teach[browser]')")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[str]:
    """The address of a JupyterLab that serves one notebook, with nobody's settings."""
    notebook = new_notebook(cells=[new_code_cell(CELL)])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    (tmp_path / "work").mkdir()
    nbformat.write(notebook, tmp_path / "work" / "board.ipynb")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    settings = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "JUPYTER_CONFIG_DIR": str(tmp_path / "config"),
        "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(tmp_path / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(tmp_path / "workspaces"),
    }
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip", "127.0.0.1",
        "--port", str(port), f"--IdentityProvider.token={TOKEN}",
        f"--ServerApp.root_dir={tmp_path / 'work'}", "--LabApp.news_url=None",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]  # fmt: skip
    with open(tmp_path / "lab.log", "wb") as log:
        server = subprocess.Popen(
            command, env=os.environ | settings, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            address = f"http://127.0.0.1:{port}"
            wait_for_server(server, f"{address}/api?token={TOKEN}", tmp_path / "lab.log")
            yield f"{address}/lab/tree/board.ipynb?token={TOKEN}"
        finally:
            server.terminate()
            server.wait(timeout=30)


def wait_for_server(server: subprocess.Popen[bytes], address: str, log: Path) -> None:
    for _ in range(PATIENCE * 4):
        assert server.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(address, timeout=5) as answer:
                json.load(answer)
                return
        except OSError:
            time.sleep(0.25)
    raise AssertionError(log.read_text())


def wait_for(browser: Any, what: str, found: Any) -> Any:
    """What ``found()`` returns once it is true."""
    from selenium.common.exceptions import (
        ElementNotInteractableException,
        StaleElementReferenceException,
    )
    from selenium.webdriver.support.ui import WebDriverWait

    not_yet = [StaleElementReferenceException, ElementNotInteractableException, IndexError]
    waiting = WebDriverWait(browser, PATIENCE, ignored_exceptions=not_yet)
    return waiting.until(lambda _: found(), f"waited in vain for {what}")


def console_errors(browser: Any) -> list[str]:
    return [e["message"] for e in browser.get_log("browser") if e["level"] == "SEVERE"]


def keep_picture(browser: Any, name: str) -> None:
    """A screenshot, for whoever asks for one: BOARD_PICTURES=folder make test-browser."""
    if folder := os.environ.get("BOARD_PICTURES"):
        browser.save_screenshot(str(Path(folder) / name))


def test_the_player_in_jupyterlab(browser: Any, lab: str) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    def all_of(selector: str) -> list[Any]:
        return browser.find_elements("css selector", selector)

    def caption() -> str:
        return all_of(".jp-OutputArea .widget-html caption")[0].text

    def press(selector: str, *keys: str) -> None:
        """Type into an element, once it is there and can be typed into."""
        wait_for(browser, selector, lambda: all_of(selector)[-1].send_keys(*keys) or True)

    handle = ".jp-OutputArea .noUi-handle"
    idle = '.jp-Notebook-ExecutionIndicator[data-status="idle"]'
    browser.get(lab)
    wait_for(browser, "the notebook", lambda: all_of(".jp-Notebook .jp-CodeCell .cm-content"))
    wait_for(browser, "the kernel", lambda: all_of(idle))
    all_of(".jp-Notebook .jp-CodeCell .cm-content")[0].click()
    ActionChains(browser).key_down(Keys.SHIFT).send_keys(Keys.ENTER).key_up(Keys.SHIFT).perform()
    wait_for(browser, "the board", lambda: caption().startswith("step 0: 1 running"))

    press(handle, Keys.ARROW_RIGHT)
    wait_for(browser, "step 1", lambda: caption().startswith("step 1:"))
    press(handle, Keys.ARROW_RIGHT)
    press(handle, Keys.ARROW_RIGHT)
    wait_for(browser, "step 3", lambda: caption().startswith("step 3: 3 running"))
    ActionChains(browser).drag_and_drop_by_offset(all_of(handle)[0], 400, 0).perform()
    wait_for(browser, "the end", lambda: caption().endswith("(end of the log)"))
    back, _ = all_of(".jp-OutputArea button.jupyter-button:not(.widget-play *)")[-2:]
    back.click()
    wait_for(browser, "one step back", lambda: caption().startswith("step 8:"))

    press(".jp-OutputArea input[type=number]", Keys.CONTROL, "a")
    press(".jp-OutputArea input[type=number]", "3", Keys.ENTER)
    wait_for(
        browser, "an answer",
        lambda: any("slot 3" in e.text and "r0, column 2" in e.text for e in all_of("pre")),
    )  # fmt: skip
    keep_picture(browser, "player.png")
    assert console_errors(browser) == []


def test_the_page(browser: Any, tmp_path: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    page = tmp_path / "board.html"
    page.write_text(board_page(ghost_log("all"), "A run of the ghost"), encoding="utf-8")
    browser.get(page.as_uri())

    def get(name: str) -> Any:
        return browser.find_element("id", name)

    assert get("title").text.startswith("step 0:")
    body = browser.find_element("tag name", "body")
    body.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert get("title").text.startswith("step 3: 3 running")
    assert (
        len(browser.find_elements("css selector", "#board th[scope=row]")) == 5
    )  # 3, evicted, free
    get("slider").send_keys(Keys.ARROW_RIGHT)  # the slider's own keys count once
    assert get("title").text.startswith("step 4:")
    body.send_keys(Keys.END)
    assert get("title").text.endswith("(end of the log)")
    get("back").click()
    assert get("title").text.startswith("step 8:")
    body.send_keys(Keys.HOME, Keys.ARROW_LEFT)
    get("play").click()
    wait_for(browser, "the next step", lambda: get("title").text.startswith("step 2:"))
    get("play").click()
    assert get("play").get_attribute("aria-pressed") == "false"
    get("slot").send_keys(Keys.CONTROL, "a")
    get("slot").send_keys("3")
    assert "r0, column 2 of mamba 0" in get("answer").text
    keep_picture(browser, "page.png")
    assert console_errors(browser) == []

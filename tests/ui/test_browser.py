"""The pages of `drawbar ui` in Chromium: runs that failed, were killed, or continue, and a file."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from drawbar import train, ui
from drawbar.train import DataParallelTrainer, RunConfig, ScalingConfig, WorkerGroupError

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
exceptions = pytest.importorskip("selenium.common.exceptions")
waiting = pytest.importorskip("selenium.webdriver.support.ui")
screenshots = pytest.importorskip("benchmarks.screenshots")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
if CHROMIUM is None or DRIVER is None:
    pytest.skip("Chromium and chromedriver are not installed", allow_module_level=True)

HOSTILE = "<img src=x onerror=\"document.title='HACKED'\"></script><script>x</script>"
KILLED = """
import os, signal, sys
from drawbar import train

def train_func(config):
    with train.checkpoint_dir() as path:
        (path / "model").write_text("weights")
        train.report({"loss": 1.0}, checkpoint=path)
    train.report({"loss": 0.5})
    os.kill(os.getpid(), signal.SIGKILL)

train.DataParallelTrainer(
    train_func,
    scaling_config=train.ScalingConfig(num_workers=0),
    run_config=train.RunConfig(name="killed", storage_path=sys.argv[1]),
).fit()
"""


def fail(config: dict[str, Any]) -> None:
    print(f"\x1b[31mred\x1b[0m {HOSTILE}")
    for step in range(config["steps"]):
        with train.checkpoint_dir() as path:
            (path / HOSTILE.replace("/", "")).write_text("weights")
            train.report({"loss": 1 / (step + 1), HOSTILE: step}, checkpoint=path)
    raise ValueError(HOSTILE)


def report_twice(config: dict[str, Any]) -> None:
    train.report({"loss": 0.25})
    with Path(config["pipe"]).open("rb") as pipe:
        pipe.read(2)
    train.report({"loss": 0.125})


def start(storage: Path, name: str, function: Any, config: dict[str, Any]) -> None:
    DataParallelTrainer(
        function,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name=name, storage_path=str(storage)),
    ).fit()


HAS_GREEN_LINE = """(() => {
    const canvas = document.querySelector('.charts canvas');
    const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
    let count = 0;
    for (let i = 0; i < data.length; i += 4) {
        count += data[i + 1] - data[i] > 60 && data[i + 3] > 99;
    }
    return count > 20;
})()"""
"""True if the first chart has pixels in the colour of its first line."""


@dataclass(frozen=True)
class Page:
    """A browser, and the server whose pages it shows."""

    driver: Any
    url: str
    storage: Path

    def open(self, address: str) -> None:
        self.driver.get("about:blank")
        self.driver.get(address)

    def open_run(self, name: str) -> None:
        runs = {run["name"]: run["id"] for run in ui.list_run_summaries([self.storage])}
        self.open(f"{self.url}#/run/{runs[name]}")

    def wait_for(self, script: str) -> Any:
        """Return the first true value of a JavaScript expression."""
        return waiting.WebDriverWait(self.driver, 60).until(
            lambda driver: driver.execute_script(f"return {script}")
        )

    def wait_for_text(self, selector: str, text: str) -> None:
        self.wait_for(
            f"[...document.querySelectorAll({selector!r})]"
            f".some(element => element.textContent.includes({text!r}))"
        )

    def wait_for_chart(self) -> None:
        """Wait for a curve. Charts are drawn only close to the viewport."""
        self.wait_for("document.querySelector('.charts')")
        self.driver.execute_script("document.querySelector('.charts').scrollIntoView()")
        self.wait_for("document.querySelector('.charts canvas')")

    def click(self, selector: str, text: str) -> None:
        """Click the first element of a selector that has this text."""
        found = (
            f"[...document.querySelectorAll({selector!r})].find(e => e.textContent === {text!r})"
        )
        self.wait_for(found)
        self.driver.execute_script(f"{found}.click()")

    def press(self, key: str) -> None:
        webdriver.ActionChains(self.driver).send_keys(key).perform()

    def check(self) -> None:
        """Check that no text was executed, no script failed, and the page is not too wide."""
        assert "HACKED" not in self.driver.title
        assert not self.driver.execute_script("return document.querySelector('#app img')")
        assert not [log for log in self.driver.get_log("browser") if log["level"] == "SEVERE"]
        assert self.driver.execute_script(
            "return document.documentElement.scrollWidth <= innerWidth"
        )


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    storage = tmp_path_factory.mktemp("runs")
    with pytest.raises(WorkerGroupError):
        start(storage, "failed", fail, {"steps": 3, "lr": 0.1})
    with pytest.raises(WorkerGroupError):
        start(storage, "failed-again", fail, {"steps": 1, "lr": 0.2})
    killed = subprocess.run([sys.executable, "-c", KILLED, str(storage)], capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.add_argument("--window-size=1280,1000")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        with ui.start_server([storage], port=0) as server:
            yield Page(driver, server.url, storage)
    finally:
        driver.quit()


def set_width(page: Page, width: int) -> None:
    page.driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False},
    )


@pytest.mark.parametrize("width", [1280, 390])
def test_failed_run_with_hostile_names_shows_its_root_cause_as_text(page: Page, width: int) -> None:
    set_width(page, width)
    page.open_run("failed")
    page.wait_for_text("section.cause h1", HOSTILE)
    page.wait_for_text("section.cause pre", "ValueError")
    page.wait_for_text(".remedy", "Fix the error first")
    page.wait_for_chart()
    page.wait_for(HAS_GREEN_LINE)
    page.wait_for_text(".log .a-31", "red")
    page.wait_for_text("section[aria-label='Goodput']", "Productive")
    page.check()


def test_killed_run_shows_the_work_after_its_last_checkpoint(page: Page) -> None:
    set_width(page, 1280)
    page.open_run("killed")
    page.wait_for_text("header .pill", "interrupted")
    page.wait_for_text(".remedy pre", "resume=")
    page.wait_for_text("section[aria-label='Timeline'] .legend", "unsaved")
    page.check()


def test_keyboard_opens_the_files_of_a_checkpoint_and_searches_logs(page: Page) -> None:
    page.open_run("failed")
    button = "document.querySelector('section[aria-label=Checkpoints] button.link')"
    page.wait_for(button)
    page.driver.execute_script(f"{button}.focus()")
    page.press("\ue007")  # Enter
    page.wait_for_text("[aria-label=Checkpoint] table", "<img")
    page.driver.execute_script("document.querySelector('[aria-label=\"Search logs\"]').focus()")
    page.press("RED")
    page.wait_for_text(".log .current mark", "red")
    page.driver.execute_script("document.querySelector('[aria-label^=\"Timeline. Keys\"]').focus()")
    page.press("+")
    page.wait_for(
        "[...document.querySelectorAll('[aria-label=\"Zoom out\"]')].some(e => !e.disabled)"
    )
    page.check()


def test_list_compares_selected_runs_and_shows_differing_settings(page: Page) -> None:
    page.open(page.url)
    page.wait_for("document.querySelectorAll('table.runs tbody tr').length === 3")
    page.driver.execute_script(
        "[...document.querySelectorAll('tr')].filter(row => row.textContent.includes('failed'))"
        ".forEach(row => row.querySelector('input')?.click())"
    )
    page.click("button", "Compare 2 runs")
    page.wait_for_text("section[aria-label='Differing settings'] tbody", "lr")
    page.wait_for_chart()
    page.check()


def test_exported_file_opens_without_a_server(page: Page, tmp_path: Path) -> None:
    file = ui.export_html([page.storage], tmp_path / "runs.html")
    page.open(file.as_uri())
    page.wait_for("document.querySelectorAll('table.runs tbody tr').length === 3")
    page.click("table.runs a", "failed")
    page.wait_for_text("section.cause h1", HOSTILE)
    page.wait_for_chart()
    page.wait_for_text(".log .a-31", "red")
    page.check()


def test_live_run_is_updated_until_the_server_stops(page: Page, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    descriptor = os.open(pipe, os.O_RDWR)  # does not wait for a reader
    storage = tmp_path / "runs"
    storage.mkdir()

    command = [sys.executable, "-m", "drawbar.cli", "ui", str(storage), "--port=0", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        page.open(server.stdout.readline().split()[-1])
        page.wait_for_text("section.empty", "There are no runs yet.")
        config = {"pipe": str(pipe)}
        thread = threading.Thread(target=start, args=(storage, "live", report_twice, config))
        thread.start()
        try:
            page.wait_for_text("table.runs td", "running")
            page.driver.execute_script("document.querySelector('table.runs a').click()")
            page.wait_for_text("header .pill", "running")
        finally:
            os.write(descriptor, b"go")
            thread.join()
            os.close(descriptor)
        page.wait_for_text("header .pill", "finished")
        page.check()
        server.send_signal(signal.SIGINT)
    assert server.returncode == 0
    page.wait_for_text(".stopped", "The server has stopped. Data as of")
    page.driver.get_log("browser")  # failed connections


DRAW_CURVE = """
const context = document.querySelectorAll("canvas")[arguments[0]].getContext("2d");
context.fillStyle = "rgb(0, 180, 90)";
context.fillRect(0, 50, 300, 2);
"""


def test_screenshot_of_page_with_chart_without_curve_raises(page: Page) -> None:
    page.open("data:text/html,<div class=charts></div>")
    errors = [wait_for_missing_curve(page)]
    for number in range(2):  # of two charts, none has a curve, and then one
        page.driver.execute_script(
            "document.querySelector('.charts')"
            ".insertAdjacentHTML('beforeend', '<figure><canvas></canvas></figure>')"
        )
        errors.append(wait_for_missing_curve(page))
        page.driver.execute_script(DRAW_CURVE, number)
        screenshots.wait_for_curves(page.driver)
    assert errors == ["A chart in the window has no curve."] * 3


def wait_for_missing_curve(page: Page) -> str:
    with pytest.raises(exceptions.TimeoutException) as caught:
        screenshots.wait_for_curves(page.driver, timeout=0.1)
    return str(caught.value.msg)


def test_screenshot_of_run_waits_for_curves(page: Page) -> None:
    page.open_run("failed")
    page.wait_for_chart()
    screenshots.wait_for_curves(page.driver)

"""Make the screenshots of the web UI in docs/images: train small networks, and open their pages.

Needs Chromium with its driver, and the packages selenium and pillow. From the repository root, on a
machine that does nothing else: `python -m benchmarks.screenshots [STORAGE]`.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from drawbar import ui

webdriver = importlib.import_module("selenium.webdriver")
support = importlib.import_module("selenium.webdriver.support.ui")
IMAGES = Path(__file__).parent.parent / "docs" / "images"
TRAINING = Path(__file__).with_name("_screenshot_runs.py")
IS_DRAWN = """
const charts = [...document.querySelectorAll(".charts figure")]
    .filter((chart) => chart.getBoundingClientRect().top < innerHeight);
return charts.length > 0 && charts.every((chart) => {
    const canvas = chart.querySelector("canvas");
    if (!canvas || !canvas.width) return false;
    const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    let count = 0;
    for (let i = 0; i < data.length; i += 4) {
        count += data[i + 1] - data[i] > 60 && data[i + 3] > 99;
    }
    return count > 50;
});
"""
"""JavaScript: whether each chart in the window has pixels in the colour of its first line."""


def open_browser(width: int) -> Any:
    """Start Chromium without a window."""
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--hide-scrollbars"):
        options.add_argument(argument)
    options.add_argument(f"--window-size={width},1000")
    return webdriver.Chrome(
        options=options, service=webdriver.ChromeService(shutil.which("chromedriver"))
    )


def take(browser: Any, url: str, selector: str, name: str, height: int) -> None:
    """Open a page, wait until it is drawn, and save the top of the page as a small PNG.

    Raises:
        TimeoutException: An element of the selector, or a curve, is missing after 60 s.
    """
    width = browser.get_window_size()["width"]
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
    )
    browser.get("about:blank")
    browser.get(url)
    support.WebDriverWait(browser, 60).until(
        lambda _: browser.find_elements("css selector", selector)
    )
    if selector == ".charts":
        wait_for_curves(browser)
    Image = importlib.import_module("PIL.Image")
    image = Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")
    IMAGES.mkdir(exist_ok=True)
    image.quantize(128).save(IMAGES / name, optimize=True)
    print(IMAGES / name)


def wait_for_curves(browser: Any, timeout: float = 60) -> None:
    """Wait until each chart in the window shows a curve."""
    support.WebDriverWait(browser, timeout).until(
        lambda _: browser.execute_script(IS_DRAWN), "A chart in the window has no curve."
    )


def main() -> None:
    """Make all screenshots."""
    storage = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
    if not os.listdir(storage):
        script = shutil.copy(TRAINING, Path(tempfile.mkdtemp()) / "train.py")
        environment = {**os.environ, "RAY_ADDRESS": "local"}
        subprocess.run([sys.executable, str(script), storage], check=True, env=environment)
    runs = {run["name"]: run["id"] for run in ui.list_run_summaries([storage])}
    compared = "%2C".join(identity for name, identity in runs.items() if "-lr-" in name)
    browser = open_browser(1280)
    with contextlib.closing(ui.start_server([storage], port=0)) as server:
        try:
            take(browser, server.url, "table.runs", "ui-runs.png", 460)
            page = f"{server.url}#/run/{runs['digits-cnn']}"
            take(browser, page, ".charts", "ui-run.png", 1560)
            take(browser, f"{server.url}#/compare/{compared}", ".charts", "ui-compare.png", 900)
        finally:
            browser.quit()


if __name__ == "__main__":
    main()

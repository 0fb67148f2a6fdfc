"""Make the screenshots of the web UI in docs/images: run example runs, and open their pages.

Needs Chromium with its driver, and the packages selenium and pillow. From the repository root:
`python -m benchmarks.screenshots [STORAGE]`.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from drawbar import train, ui

Image = importlib.import_module("PIL.Image")
webdriver = importlib.import_module("selenium.webdriver")
support = importlib.import_module("selenium.webdriver.support.ui")
IMAGES = Path(__file__).parent.parent / "docs" / "images"


def train_func(config: dict[str, Any]) -> None:
    """Report the curves of a simulated model, and fail at the configured steps."""
    context = train.get_context()
    rank = context.get_world_rank()
    noise = random.Random(rank)
    first = 0
    if checkpoint := train.get_checkpoint():
        first = int((Path(checkpoint.path) / "step.txt").read_text()) + 1
    print(f"\x1b[1mrank {rank}\x1b[0m: training from step {first}")
    for step in range(first, config["steps"]):
        time.sleep(config["seconds"] * (1.5 if rank == 1 and step > 60 else 1))
        loss = 0.4 + 2.2 * math.exp(-config["lr"] * step) + noise.gauss(0, 0.05)
        metrics = {"loss": loss, "accuracy": 1 - loss / 3, "grad_norm": loss + noise.random() / 4}
        print(f"step {step:4d}  loss {loss:.3f}")
        if step % 20 == 19:
            with train.checkpoint_dir() as directory:
                (Path(directory) / "model.pt").write_bytes(os.urandom(200_000))
                (Path(directory) / "step.txt").write_text(str(step))
                train.report(metrics, checkpoint=train.Checkpoint.from_directory(directory))
        else:
            train.report(metrics)
        if rank == 1 and step in config["kills"] and step - first > 40:  # not again after a resume
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1 and step == config.get("error_at"):
            print("\x1b[31mERROR\x1b[0m: batch 148 contains NaN")
            raise ValueError("batch 148 contains NaN: check shard-0007.parquet")


def make_runs(storage: str) -> None:
    """Run the examples: three that finish, and one that fails after two restarts."""
    base = {"steps": 120, "seconds": 0.02, "kills": []}
    for lr in (0.02, 0.05, 0.1):
        start(f"resnet-lr-{lr}", storage, {**base, "lr": lr}, num_workers=0)
    failing = {**base, "seconds": 0.08, "lr": 0.03, "kills": [50, 95], "error_at": 148}
    with contextlib.suppress(train.TrainingFailedError):
        start("llama-sft", storage, {**failing, "steps": 200}, num_workers=2)


def start(name: str, storage: str, config: dict[str, Any], num_workers: int) -> None:
    """Run the training function."""
    train.DataParallelTrainer(
        train_func,
        train_loop_config=config,
        scaling_config=train.ScalingConfig(num_workers=num_workers),
        run_config=train.RunConfig(
            name=name,
            storage_path=storage,
            failure_config=train.FailureConfig(max_failures=2),
        ),
    ).fit()


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
    """Open a page, wait for an element, and save the top of the page as a small PNG."""
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
    browser.execute_async_script("setTimeout(arguments[0], 1500)")
    image = Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")
    IMAGES.mkdir(exist_ok=True)
    image.quantize(128).save(IMAGES / name, optimize=True)
    print(IMAGES / name)


def main() -> None:
    """Make all screenshots."""
    storage = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
    if not os.listdir(storage):
        script = shutil.copy(__file__, Path(tempfile.mkdtemp()) / "train.py")  # shown in the pages
        command = [sys.executable, str(script), "--runs", storage]
        subprocess.run(command, check=True)
    runs = {run["name"]: run["id"] for run in ui.list_run_summaries([storage])}
    compared = "%2C".join(identity for name, identity in runs.items() if "resnet" in name)
    browser = open_browser(1280)
    with contextlib.closing(ui.start_server([storage], port=0)) as server:
        try:
            take(browser, server.url, "table.runs", "ui-runs.png", 460)
            page = f"{server.url}#/run/{runs['llama-sft']}"
            take(browser, page, "canvas", "ui-run.png", 1500)
            take(browser, f"{server.url}#/compare/{compared}", "canvas", "ui-compare.png", 900)
        finally:
            browser.quit()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--runs"]:
        make_runs(sys.argv[2])
    else:
        main()

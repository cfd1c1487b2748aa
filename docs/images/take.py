"""Takes the dashboard's pictures in this folder: `python docs/images/take.py RUNS_DIR RUN [OTHER]`. Needs the extras dashboard and browser,
Pillow and a Chromium; RUN and OTHER are runs of one Program, of which the pictures say all that is written beside every chart.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import threading
import time
from pathlib import Path

import uvicorn
from PIL import Image
from playwright.sync_api import Locator, sync_playwright

from alpha.dashboard import command

HERE = Path(__file__).parent
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")


def keep(name: str, picture: bytes) -> None:
    """Write a picture in 256 colours, those first that cover the most different ones (a phase's colour may be rare)."""
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    image = image.quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    image.save(HERE / f"{name}.png", optimize=True)
    print(f"{name}.png {(HERE / f'{name}.png').stat().st_size / 1e3:.0f} kB")


def main(runs: Path, run: str, other: str | None) -> None:
    with command.listen("127.0.0.1", 0) as listener, sync_playwright() as playwright:
        server = uvicorn.Server(uvicorn.Config(command.application(runs, "127.0.0.1"), log_level="warning", lifespan="off", ws="none"))
        threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True).start()
        at = f"http://127.0.0.1:{listener.getsockname()[1]}"
        path = os.environ.get("ALPHA_BROWSER") or next(filter(None, map(shutil.which, NAMES)))
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1360, "height": 900}, color_scheme="light")

        def panel(name: str) -> Locator:
            found = page.locator(f"#p-{name}")
            found.scroll_into_view_if_needed()
            return found

        page.goto(f"{at}/profiling?run={run}")
        page.wait_for_selector("#p-timeline .barlayer .point")
        time.sleep(1)
        keep("dashboard", page.screenshot())
        for _ in range(3):
            panel("timeline").locator("#tl-in").click()
            time.sleep(1)
        page.mouse.move(5, 5)
        keep("timeline", panel("timeline").screenshot())
        if other:
            page.goto(f"{at}/profiling?run={run}&with={other}")
            page.wait_for_selector("#p-comparison [data-verdict]")
            time.sleep(1)
            keep("comparison", panel("comparison").screenshot())
        page.goto(f"{at}/gates")
        page.wait_for_selector("table.gates tbody tr")
        keep("gates", page.screenshot())
        browser.close()
        server.should_exit = True


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else None)

"""Make the pictures of the README from a recorded run: the growing network, the live page and the terminal view.

    esper grow --task rescue --epochs 30 --out runs/rescue
    python scripts/make_pictures.py runs/rescue

Needs playwright, Pillow and a Chromium browser. Writes growth.png, dash.png and watch.png in docs/images.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import subprocess
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from esper.karn.watch.app import WatchApp

IMAGES = Path(__file__).parents[1] / "docs" / "images"
PAGE_SIZE = (1400, 1480)
NETWORK_WIDTH = 820
"""Of the page from which the network is taken: the README shows it unscaled, on its first screen."""
TERMINAL_SIZE = (120, 36)
MOST_BYTES = 200_000


def photograph_page(browser: Browser, run: Path, out: Path, network: Path) -> None:
    """Open a run in `esper dash`; save the visible part of the page, and the growing network without controls."""
    server = subprocess.Popen([sys.executable, "-m", "esper", "dash", str(run)], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = next(match[0] for line in server.stdout if (match := re.search(r"http://\S+", line)))
        page = browser.new_page(viewport={"width": PAGE_SIZE[0], "height": PAGE_SIZE[1]}, color_scheme="light")
        page.goto(address)
        page.goto(address.split("?")[0] + "#/run/0")
        page.wait_for_selector("canvas")
        page.locator("input[type=range]").fill("6")  # the third seed has just joined
        page.locator("input[type=range]").blur()
        page.wait_for_timeout(1500)  # the charts have been drawn
        page.screenshot(path=out)
        page.set_viewport_size({"width": NETWORK_WIDTH, "height": PAGE_SIZE[1]})
        panel = page.locator("section").filter(has=page.locator("svg.network")).last
        panel.evaluate("p => { for (const e of p.children) e.hidden = !e.matches('svg, .readout, .lanes'); }")
        page.wait_for_timeout(1500)
        panel.screenshot(path=network)
    finally:
        server.kill()
        server.wait()


async def terminal_svg(run: Path) -> str:
    """Return a screenshot of `esper watch` as SVG, without references to fonts elsewhere."""
    app = WatchApp(run)
    async with app.run_test(size=TERMINAL_SIZE) as pilot:
        await app.read()
        await pilot.pause(2.0)  # the tables have taken their widths
        return re.sub(r"@font-face\s*{.*?}", "", app.export_screenshot(title=f"esper watch {run}"), flags=re.DOTALL)


def photograph_svg(browser: Browser, svg: str, out: Path) -> None:
    """Save a picture of an SVG."""
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.set_content(f"<body style='margin: 0'>{svg}</body>")
    page.locator("svg").first.screenshot(path=out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="A run directory.")
    parser.add_argument("--chromium", default="/usr/bin/chromium", help="The browser.")
    options = parser.parse_args()
    network, page, terminal = (IMAGES / f"{name}.png" for name in ("growth", "dash", "watch"))
    svg = asyncio.run(terminal_svg(options.run))
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=options.chromium, args=["--no-sandbox"])
        photograph_page(browser, options.run, page, network)
        photograph_svg(browser, svg, terminal)
    for out in (network, page, terminal):
        Image.open(out).convert("RGB").quantize(256).save(out, optimize=True)
        size = out.stat().st_size
        print(f"{out}: {size:,} bytes" + (f", more than {MOST_BYTES:,}" if size > MOST_BYTES else ""))


if __name__ == "__main__":
    main()

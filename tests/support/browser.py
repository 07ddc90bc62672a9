"""A real browser for tests of pages: Debian's chromium through playwright."""

from pathlib import Path

import pytest

CHROMIUM = Path("/usr/bin/chromium")
NASTY = "</script><img src=x onerror=alert(1)>\"'&{{x}}<!--body-->"
"""A text that runs a script or adds elements in a page that does not escape it."""


def launched():
    """Yield the browser, or skip with a reason. Use it as `yield from launched()` in a fixture."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pages are not looked at")
    if not CHROMIUM.exists():
        pytest.skip(f"there is no {CHROMIUM}: pages are not looked at")
    with api.sync_playwright() as play:
        chrome = play.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield chrome
        chrome.close()


class Visits:
    """Pages that were opened, and what went wrong in them: console messages, dialogs, requests to other places."""

    def __init__(self, browser):
        from playwright.sync_api import expect

        self.browser, self.pages, self.trouble, self.expect = browser, [], [], expect

    def open(self, url, width=1280, scheme="light", height=900):
        context = self.browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        page = context.new_page()
        own = url.split("?")[0].split("#")[0]
        page.on("console", lambda message: self.trouble.append(message.text))
        page.on("pageerror", lambda error: self.trouble.append(str(error)))
        page.on("dialog", lambda dialog: self.trouble.append(f"dialog {dialog.message}"))
        page.on("request", lambda r: r.url.startswith((own, "data:")) or self.trouble.append(f"request {r.url}"))
        page.goto(url)
        self.pages.append(page)
        return page

    def close(self):
        while self.pages:
            self.pages.pop().context.close()


def too_wide(page, width):
    """Return the elements that make the page wider than the screen."""
    if page.evaluate("document.documentElement.scrollWidth") <= width:
        return []
    wide = f"[...document.querySelectorAll('main *')].filter(n => n.getBoundingClientRect().right > {width})"
    return page.evaluate(f"{wide}.map(n => `${{n.tagName}}.${{n.getAttribute('class')}}`).slice(0, 20)")

"""Check a built documentation site: no page loads anything from another host.

python scripts/check_site.py build/site
"""

from __future__ import annotations

import argparse
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

LOADING = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "object": "data"}
"""Attributes that make a browser load something, by element. Links that a reader follows are not among them."""
CSS_ADDRESS = re.compile(r"""(?:url\(|@import)\s*["']?((?:https?:)?//[^"')\s]+)""")


class LoadedAddresses(HTMLParser):
    """Collects the addresses that a browser loads for a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value for name, value in attrs if name == LOADING.get(tag) and value]
        self.addresses += [
            match for name, value in attrs if name == "style" for match in CSS_ADDRESS.findall(value or "")
        ]


def outside_resources(site: Path) -> list[str]:
    """Return `page: address` for everything that pages and style sheets load from another host."""
    outside_addresses = []
    for page in sorted(site.rglob("*.html")):
        addresses = LoadedAddresses()
        text = page.read_text()
        addresses.feed(text)
        inline = [
            match for style in re.findall(r"<style.*?</style>", text, re.DOTALL) for match in CSS_ADDRESS.findall(style)
        ]
        outside = [address for address in addresses.addresses if re.match(r"(\w+:)?//", address)]
        outside_addresses += [f"{page.relative_to(site)}: {address}" for address in outside + inline]
    for sheet in sorted(site.rglob("*.css")):
        outside_addresses += [
            f"{sheet.relative_to(site)}: {address}" for address in CSS_ADDRESS.findall(sheet.read_text())
        ]
    return outside_addresses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path, help="The directory of the built site.")
    site = parser.parse_args().site
    pages = list(site.rglob("*.html"))
    if not (site / "index.html").exists():
        sys.exit(f"{site} holds no built site: run make docs")
    outside = outside_resources(site)
    print(*outside, sep="\n", end="\n" if outside else "")
    if outside:
        sys.exit("the site must load everything from itself")
    print(f"{len(pages)} pages in {site}, nothing loaded from elsewhere")


if __name__ == "__main__":
    main()

"""Check the internal links of the built site, and that the search finds GradMonitor first for its words.

python docs/_ext/check_site.py build/docs
"""

import json
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

WORDS = ("skip", "clip", "nan", "spike")


class Page(HTMLParser):
    """Targets and anchors of one page."""

    def __init__(self, path):
        super().__init__()
        self.links, self.anchors = set(), set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name in ("href", "src") and value:
                self.links.add(value)
            elif name in ("id", "name") and value:
                self.anchors.add(value)


def broken_links(site):
    """Yield page and link of the internal links without a target."""
    pages = {path: Page(path) for path in site.rglob("*.html")}
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists() or (
                parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors
            ):
                yield path, link


def words_elsewhere(site):
    """Yield words whose main index entry, which the search ranks first, is not on the page of GradMonitor."""
    text = (site / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    for word in WORDS:
        entries = index["indexentries"].get(word, [])
        if [index["docnames"][page] for page, _, main in entries if main] != ["monitors/grad_monitor"]:
            yield word


def main():
    site = Path(sys.argv[1]).resolve()
    failures = [f"{path.relative_to(site)}: no target for {link}" for path, link in broken_links(site)]
    failures += [f"search: {word} is not indexed on the page of GradMonitor" for word in words_elsewhere(site)]
    sys.exit("\n".join(failures) or 0)


if __name__ == "__main__":
    main()

"""Write the generated parts of the pages: arguments and keys of monitors, troubleshooting, and names of the API.

    python docs/_ext/generated.py

A page holds a part between two comments, ``<!-- arguments GradMonitor -->``, for instance, and ``<!-- end -->``.
"""

import re
from pathlib import Path

import api
import arguments
import metrics
import troubleshooting

DOCS = Path(__file__).parents[1]
PARTS = {
    "names": api.summaries,  # of a module's public names
    "arguments": arguments.listing,  # of a public class
    "keys": metrics.table,  # of a schema
    "reference": metrics.reference,  # the keys of all schemas
    "findings": troubleshooting.tables,
}
PART = re.compile(rf"(<!-- ({'|'.join(PARTS)})(?: ([\w. ]+))? -->\n).*?(<!-- end -->)", re.DOTALL)


def written(page):
    """Return the page with its parts between the comments."""

    def filled(match):
        begin, part, name, end = match.groups()
        return "\n".join([begin, *PARTS[part](*(name or "").split()), "", end])

    return PART.sub(filled, page)


if __name__ == "__main__":
    for path in DOCS.rglob("*.md"):
        text = path.read_text(encoding="utf-8")
        if text != written(text):
            path.write_text(written(text), encoding="utf-8")

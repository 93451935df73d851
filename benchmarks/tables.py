"""Measure the tables and figures of the documentation that come from benchmarks, and write the tables into its pages.

Every table has a file in ``benchmarks/results``: what its script has printed, provenance included. A page holds the
table between two comments, ``<!-- results/NAME.md -->`` and ``<!-- end -->``.

    PYTHONPATH=. python benchmarks/tables.py [--only NAME ...]    run the scripts (an hour), then write the pages
    PYTHONPATH=. python benchmarks/tables.py --pages              write the pages from the recorded files alone
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

from trainings import COMMIT, commit

HERE = Path(__file__).resolve().parent
RESULTS, DOCS = HERE / "results", HERE.parent / "docs"
TABLES = {  # name -> command
    "bench_cost": ["bench_cost.py"],
    "constants": ["recovery.py", "--constants"],
    "diagnosis": ["diagnosis.py"],
    "learning_rate_transfer": ["learning_rate_transfer.py", "--draw", f"{DOCS}/figures/learning_rate_transfer.png"],
    "recovery": ["recovery.py", "--draw", f"{DOCS}/recovery.png"],
    "regimes": ["recovery.py", "--regimes"],
    "thresholds": ["thresholds.py"],
}


def measure(name: str) -> None:
    """Run the script of a table, and record what it prints."""
    script, *arguments = TABLES[name]
    output = subprocess.run([sys.executable, HERE / script, *arguments], stdout=subprocess.PIPE, check=True)
    text = output.stdout.decode().replace(f"{HERE.parent}/", "")
    (RESULTS / f"{name}.md").write_text(f"{text.strip()}\n", encoding="utf-8")


def with_tables(page: str) -> str:
    """A page with the recorded tables between its comments."""

    def recorded(match: re.Match[str]) -> str:
        return f"{match[1]}\n{(RESULTS / match[2]).read_text(encoding='utf-8').strip()}\n{match[3]}"

    return re.sub(r"(<!-- results/(\S+) -->)\n.*?(<!-- end -->)", recorded, page, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=[*TABLES], default=[*TABLES])
    parser.add_argument("--pages", action="store_true", help="run no script")
    args = parser.parse_args()
    os.environ[COMMIT] = commit()  # before files are written
    for name in [] if args.pages else args.only:
        measure(name)
    for path in DOCS.rglob("*.md"):
        page = path.read_text(encoding="utf-8")
        if page != with_tables(page):
            path.write_text(with_tables(page), encoding="utf-8")


if __name__ == "__main__":
    main()

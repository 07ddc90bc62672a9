"""Write the tables and charts of saved studies into docs/studies/, so that no figure there is typed by hand.

    python scripts/study_tables.py            # update docs/studies/NAME.md and NAME-TASK.svg from studies/NAME.json
    python scripts/study_tables.py --check    # exit with code 1 and name the files that are not up to date

In NAME.md the text between the two markers is replaced; the text around it is kept.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from esper.commands.frontier_chart import frontier_chart
from esper.studies.rendering import as_markdown
from esper.studies.results import SavedStudy, points_of
from esper.studies.statistics import summarize

BEGIN, END = "<!-- study tables: begin -->", "<!-- study tables: end -->"


def pages(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield every generated file below `root` with the content it must have."""
    docs = root / "docs" / "studies"
    for path in sorted((root / "studies").glob("*.json")):
        saved = msgspec.json.decode(path.read_bytes(), type=SavedStudy)
        study = saved.study
        summary = summarize(study, points_of(saved.records), study.metric)
        yield from ((docs / f"{study.name}-{task}.svg", frontier_chart(summary, task)) for task in study.task)
        charts = "\n".join(f"![{task}]({study.name}-{task}.svg)" for task in study.task)
        tables = f"{BEGIN}\nCommand: `{saved.command}`\n\n{as_markdown(summary)}\n\n{charts}\n{END}"
        page = docs / f"{study.name}.md"
        title = study.name.replace("_", " ").capitalize()
        text = page.read_text() if page.exists() else f"# {title}\n\n{study.question}\n\n{BEGIN}{END}\n"
        if text.count(BEGIN) != 1 or text.count(END) != 1:
            sys.exit(f"{page} must contain each marker once: {BEGIN} and {END}")
        yield page, text[: text.index(BEGIN)] + tables + text[text.index(END) + len(END) :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a file is not up to date")
    parser.add_argument("--root", type=Path, default=Path(), help="the repository root")
    options = parser.parse_args()
    outdated = [(path, text) for path, text in pages(options.root) if not path.exists() or path.read_text() != text]
    for path, text in outdated:
        print(f"{'not up to date' if options.check else 'wrote'}: {path}")
        if not options.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    sys.exit(1 if options.check and outdated else 0)


if __name__ == "__main__":
    main()

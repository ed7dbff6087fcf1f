"""Score estimators of GPU memory on published measurements, and write docs/ESTIMATORS.md.

    PYTHONPATH=benchmarks python -m measurements [--check] [--rows [SOURCE]]

benchmarks/measurements/rows.csv has the measurements. --check compares the numbers with those of the document instead
of writing it. --rows prints each row, or those of a source, with the errors of vaemem's two answers.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from measurements.scoreboard import BOARD, ask, score
from measurements.scoreboard_page import BEGIN, END, figure, of_sources, text
from measurements.vocabulary import read_rows, read_sources

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT, FIGURE = ROOT / "docs" / "ESTIMATORS.md", ROOT / "docs" / "images" / "scoreboard.svg"
BY_SOURCE = ROOT / "benchmarks" / "results" / "scoreboard.csv"


def made() -> dict[Path, str]:
    """Return the files: the part of docs/ESTIMATORS.md with numbers, its figure, and the errors by source."""
    sources, every = read_sources(), read_rows()
    rows = [row for row in every if not row.doubtful]
    answers = {of.name: [(row, of.answer(row)) for row in rows] for of in BOARD}
    unseen = {
        name: [pair for pair in all_of if not sources[pair[0].source]["learned"]] for name, all_of in answers.items()
    }
    counts = {
        "all": len(every), "scored": len(rows), "doubtful": len(every) - len(rows), "sources": len(sources),
        "publishers": len({source["publisher"] for source in sources.values()}),
    }  # fmt: skip
    scores, every_score = (
        [score(of, of_rows[of.name], of_rows[BOARD[0].name]) for of in BOARD] for of_rows in (unseen, answers)
    )
    own = answers[BOARD[0].name]
    head, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)
    return {
        DOCUMENT: f"{head}{BEGIN}\n\n{text(scores, every_score, unseen, own, counts)}\n{END}{rest.partition(END)[2]}",
        FIGURE: figure([(of.name, unseen[of.name]) for of in BOARD]),
        BY_SOURCE: of_sources(own),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with the document instead of writing it")
    parser.add_argument(
        "--rows", nargs="?", const="", metavar="SOURCE", help="print rows with the errors of vaemem's answers"
    )
    args = parser.parse_args(argv)
    if args.rows is not None:
        for row in (row for row in read_rows() if args.rows in ("", row.source)):
            shares = (
                f"{100 * (a.bytes / row.bytes - 1):+8.2f}%" if a else f"{'-':>9}"
                for a in (ask(row, True), ask(row, False))
            )
            print(*shares, f"{row.bytes / 2**20:9.1f} MiB", *(str(cell) for cell in row if cell is not None), sep=" | ")
        return 0
    files = made()
    if args.check:
        other = [path for path, text in files.items() if path.read_text(encoding="utf-8") != text]
        for path in other:
            print(f"{path.relative_to(ROOT)} is not what the rows say: run make scoreboard")
        return bool(other)
    for path, contents in files.items():
        path.write_text(contents, encoding="utf-8")
    print(files[DOCUMENT].partition("## Where")[0])
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ValueError as wrong:
        sys.exit(f"scoreboard: {wrong}")

"""Judge what others published: `make reproduce`, or `make reproduce ONLY="guide note"` for a part of it."""

from __future__ import annotations

import argparse

from published.accounts import judge_equations, judge_plan
from published.claims import judge_report
from published.guide import judge_guide
from published.note import judge_note
from published.replay import judge_table
from published.times import judge_seconds

JUDGES = {
    "table": judge_table,  # a benchmark's rows, played again
    "report": judge_report,  # what its report says of them
    "seconds": judge_seconds,  # its times
    "plan": judge_plan,  # eight ways to fit a card of 12 GB
    "equation": judge_equations,  # for the memory of SD 1.5
    "guide": judge_guide,  # to a VAE's performance
    "note": judge_note,  # on MLX's decode
}


def main(given: list[str] | None = None) -> None:
    """Print the judgements that are named, or all."""
    parser = argparse.ArgumentParser(prog="published", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *JUDGES], default=[], metavar="NAME", help=", ".join(JUDGES))
    for name in parser.parse_args(given).names or JUDGES:
        print(f"==== {name} ====\n\n{JUDGES[name]()}\n", flush=True)


if __name__ == "__main__":
    main()

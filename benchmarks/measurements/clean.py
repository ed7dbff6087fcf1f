"""Turn sheets of collected measurements into rows of the fixed vocabulary: rows.csv and sources.csv.

    python -m measurements.clean [SHEET ...]          (in benchmarks; rewrites both files)

The seed table and the runs in benchmarks/results come first, then the rows that are there, then those of sheets. A
sheet is a CSV that somebody typed while reading, with these columns: source, program, versions, model, op, phase,
height, width, batch, frames, tokens, steps, dtype, components, card, offload, tile, metric, value_mib, doubtful, note,
license. Its words are free. Here each becomes one of vocabulary.py's, as words.csv says; a line whose words are unknown
is refused. A value without a public source is left out, and so is a value that another line has.
"""

from __future__ import annotations

import csv
import functools
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import vaemem
from measurements.vocabulary import HERE, SOURCE_COLUMNS, parse, read_sources
from vaemem.prediction.gpus import find_gpu
from vaemem.tables.contribution import CONTRIBUTED as COLUMNS

Words = list[tuple[str, str]]
NOBODY = r"^(|not named|unknown|any|various|cpu|cuda gpu|ci gpu|amd rocm|intel|\d+ gb gpu|m-series.*|apple silicon)$"
RESULTS = HERE.parent / "results"
OWN = "this repository"
ROUNDING = 0.002  # rows of one run differ by less if two people typed them
LEAST = 16 << 20  # bytes of a phase that are worth a row


@functools.cache
def words(column: str) -> Words:
    """Read what a column's words mean, from words.csv: the first pattern that is found counts."""
    with open(HERE / "words.csv", newline="", encoding="utf-8") as file:
        return [(line["pattern"], line["meaning"]) for line in csv.DictReader(file) if line["column"] == column]


def word_of(column: str, text: str) -> str:
    """Return what a sheet's word means. ValueError if nobody said."""
    for pattern, meaning in words(column):
        if re.search(pattern, text.strip(), re.IGNORECASE):
            return meaning
    raise ValueError(f"{column}: {text!r} is not in words.csv")


def source_of(text: str) -> str:
    """Return a source's short name: OWNER/REPOSITORY#NUMBER, OWNER/REPOSITORY:PATH, hf:OWNER/DATASET, or a page."""
    for begin, instead in words("source"):
        if text.startswith(begin):
            text = instead + text[len(begin) :]
    text = re.sub(r"^https?://", "", text).removeprefix("github.com/")
    text = re.sub(r" *\(.*| (issue/PR|pull|issues) (?=\d)", lambda m: "#" if m[0].endswith((" ", "PR ")) else "", text)
    text = re.sub(r"[/ ](?:issue/PR |issues/|pull/)(\d+).*", r"#\1", text)
    if text.startswith("hf:"):
        return re.split("[ :]", text[3:])[0].join(["hf:", ""])
    return re.sub(r"@([0-9a-f]{7})[0-9a-f]*[: ]", r"@\1:", text).replace(" ", ":", 1).split(",")[0].replace(" ", "")


def address_of(source: str) -> str:
    """Return the address of a source's short name."""
    if source.startswith("hf:"):
        return "https://huggingface.co/datasets/" + "/".join(re.split("[/:]", source[3:])[:2])
    if re.match(r"[\w.-]+\.(net|io|com|org)/", source):
        return f"https://{source}"
    repository, mark, rest = re.match(r"([^#:@]+)([#:@]?)(.*)", source).groups()  # type: ignore[union-attr]
    if mark == "#":
        return f"https://github.com/{repository}/issues/{rest}"
    commit, _, path = rest.partition(":") if mark == "@" else ("HEAD", "", rest)
    return f"https://github.com/{repository}" + (f"/blob/{commit}/{path}" if path else "")


def device_of(card: str) -> str:
    """Return the card's name, or nothing for one that nobody named."""
    card = re.sub(
        r" x\d$|/any$| unspecified$|[ (,].*(inferred|unspecified|deterministic|CUDA|L20)\)?$|-class.*", "", card
    )
    if re.match(NOBODY, card.strip(), re.IGNORECASE):
        return ""
    try:
        return find_gpu(card.strip()).name
    except ValueError:
        return card.strip()  # one that vaemem does not know


def components_of(text: str, model: str, source: str, offload: str) -> str:
    """Return types of weights by role. A type that vaemem does not know is "other"."""
    text = text.strip().lower()
    if text.startswith("bnb") and "derekl35" in source:
        text += " transformer and t5"  # as its script says
    denoiser = "unet" if model.startswith(("sd15", "sd21", "sdxl")) else "transformer"
    encoder = {"flux": "text_encoder_2", "sd3": "text_encoder_3"}.get(model[:4].rstrip("-25"), "text_encoder")
    found: dict[str, str] = {"text_encoder_3": "none"} if "no t5" in text else {}
    for part in re.split(", |; ", text):
        kind = word_of("components", part)
        if kind == "-":
            continue
        kind = re.search(r"q\d_\w+", part)[0].upper() if kind == "ggml" else kind  # type: ignore[index]
        if kind in ("nf4", "int8"):  # bitsandbytes cannot move int8
            kind += " kept on cuda" * (kind == "int8" and offload == "model") or " from bfloat16" * (
                "derekl35" in source
            )
        roles = {"vae": r"\bvae\b", encoder: "t5|text.?encoder", denoiser: "transformer|unet|denoiser"}
        named = [role for role, pattern in roles.items() if re.search(pattern, part)]
        found |= dict.fromkeys(named or [denoiser], kind)
    return ", ".join(f"{role} {found[role]}" for role in sorted(found, reverse=True))


def versions_of(program: str, versions: str, source: str) -> str:
    """Return 'name version' of the software, as far as it is known to a release."""
    found = []
    if number := re.search(r"torch (\d+\.\d+(?:\.\d+)?(?:\+[\w.]+)?)(?![\d.x-])", f"{versions} "):
        found.append(f"torch {number[1]}")
    if "derekl35" in source:  # its script is of May 2025
        found.append("diffusers 0.34.0")
    elif number := re.search(r"diffusers (0\.\d+(?:\.\d+)?)(?!\.?\d| to|\+)", program):
        found.append(f"diffusers {number[1]}")
    return ", ".join(found)


def clean(line: dict[str, str]) -> dict[str, str] | None:
    """Make a row of a sheet's line; None for a bound, which is no measurement."""
    note, program = line["note"], line["program"]
    tile = line["tile"]
    if tile and not tile.isdecimal():
        note, tile = f"{note}; tiles: {tile}", "".join(re.findall(r"^\d{2,4}(?=$|x| px)", tile))
    said = (
        f"{note} {program} {line['source']} {line['dtype']} {line.get('components', '')} {line['offload']} {line['op']}"
    )
    counter = word_of("metric", line["metric"] + " unnamed" * ("kind unspecified" in note))
    if not counter:
        return None
    model, op = word_of("model", line["model"]), word_of("op", line["op"])
    runtime = word_of("program", program)
    settings = [meaning for pattern, meaning in words("settings") if re.search(pattern, said, re.IGNORECASE)]
    components = line.get("components", "") or ("" if re.search("float|^f(16|32)|^$|unknown|2-byte|half", line["dtype"])
                                                else line["dtype"])  # fmt: skip
    tile = tile or next(iter(re.findall(r"tile(?:_size=|s? )(\d+)(?: px)?(?! tiles)", note)), "")
    if found := re.search(r"(?:tile_size=|(?<![x\d])\d+x)(\d+)[ -]latent", note):
        tile = "" if "ONE" in note else str(8 * int(found[1]))
    told = line["offload"] or next(iter(re.findall("(model|sequential) (?:cpu )?offload", note)), "")
    offload = word_of("offload", told)
    pipeline = op in ("pipeline", "image to image")
    has_weights = pipeline or runtime == "sd.cpp"
    doubtful = ""
    if line["doubtful"] == "1":
        doubtful = (re.findall(r"\[([^\]]+)\]", note) or ["see the note"])[0]
    size = {name: line[name] if line[name] not in ("0", "") else "" for name in ("height", "width")}
    if re.search("inferred|assumed|do not score|resolution unknown", f"{line['model']} {note}") and not doubtful:
        doubtful = "part of the run is inferred"
    if counter == "unnamed" and not doubtful:
        doubtful = "the counter is not named"
    if not doubtful and op != "weights" and not all(size.values()):
        doubtful = "the size is not known"
    if counter == "reserved" and re.search("increment over|growth of", note, re.IGNORECASE):
        counter, doubtful = "reserved above", ""
    if counter == "allocated" and runtime == "mflux":
        counter = "mlx"
    elif counter == "allocated above" and runtime == "mflux":
        counter = "mlx above"
    return {
        "source": source_of(line["source"]), "runtime": runtime, "model": model, "op": op,
        "phase": word_of("phase", line["phase"]) if pipeline else "", **size, "batch": line["batch"] or "1",
        **{name: line.get(name) or "" for name in ("frames", "tokens", "steps")},
        "dtype": word_of("dtype", line["dtype"] or line.get("components", "")),
        "components": components_of(components, model, line["source"], offload) if has_weights else "",
        "tile": tile, "tile_overlap": "",
        "way": f"offload {offload}, VAE {word_of('vae', said)}" if pipeline else "",
        "device": device_of(line["card"]), "versions": versions_of(program, line["versions"], line["source"]),
        "settings": ", ".join(settings), "counter": counter,
        "bytes": str(round(float(line["value_mib"]) * 2**20)), "doubtful": doubtful, "note": " ".join(note.split()),
    }  # fmt: skip


def _read(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def own_rows() -> Iterator[dict[str, str]]:
    """Rows of the seed table and of our own runs on borrowed cards."""
    empty = dict.fromkeys(COLUMNS, "")

    def words(value: object) -> str:
        return "" if value is None else str(value)

    for row in vaemem.seed_table():
        if row["op"] != vaemem.tables.table.as_ran(row)["op"] and not row["op"].endswith("_tiled"):
            continue  # tiling was still on from an earlier row
        same = {name: words(row[name]) for name in row if name in empty}
        for counter in ("allocated", "reserved"):
            yield {**empty, **same, "source": "vaemem/data/seed_table.csv", "way": "", "batch": "1", "phase": "",
                   "counter": f"{counter} above", "bytes": str(row[f"{counter}_bytes"])}  # fmt: skip
    for path in sorted(RESULTS.glob("torch_memory_*.csv")):
        for line in _read(path):
            same = {name: line[name] for name in line if name in empty}
            for counter in ("allocated", "reserved"):
                if line[f"measured_{counter}_bytes"]:
                    yield {**empty, **same, "source": f"benchmarks/results/{path.name}", "batch": "1",
                           "settings": "cold" if line["protocol"] == "cold" else "", "counter": f"{counter} above",
                           "bytes": line[f"measured_{counter}_bytes"]}  # fmt: skip
    for path in sorted(RESULTS.glob("pipelines_nvidia_*.csv")):
        for line in _read(path):
            if line["call"] != "first" or line["kind"] not in ("text", "image") or line["lora"] != "0":
                continue
            stored = json.loads(line["components"]) if line["components"] else {}
            for counter in ("allocated", "reserved"):
                if int(line[counter] or 0) < LEAST:
                    continue
                yield {**empty, "source": f"benchmarks/results/{path.name}", "runtime": "diffusers",
                       "model": line["pipeline"], "op": "pipeline" if line["kind"] == "text" else "image to image",
                       "phase": "" if line["phase"] == "whole" else line["phase"], "device": line["gpu"],
                       **{name: line[name] for name in "height width batch frames tokens steps dtype".split()},
                       "components": ", ".join(f"{role} {kind}" for role, kind in stored.items()),
                       "way": f"offload {line['offload']}, VAE {line['vae']}", "versions": line["versions"],
                       "counter": counter, "bytes": line[counter]}  # fmt: skip


def lines_of(paths: list[str]) -> Iterator[tuple[str, int, dict[str, str]]]:
    for path in paths:
        with open(path, newline="", encoding="utf-8") as file:
            for number, line in enumerate(csv.DictReader(file), 2):
                yield path, number, {name: (value or "").strip() for name, value in line.items() if name}


def _run_of(row: dict[str, str]) -> tuple[str, ...]:
    """Return the cells by which two people mean one run and one counter."""
    return tuple(
        row[name] for name in COLUMNS if name not in ("note", "doubtful", "settings", "bytes", "steps", "frames")
    )


def main(paths: list[str]) -> int:
    known = read_sources(HERE)
    rows = {tuple(one.values()): one for one in own_rows()}  # the seed table has some twice
    same: dict[tuple[str, ...], list[int]] = {}
    licenses = {name: source["license"] for name, source in known.items()}
    refused = bounds = 0
    for one in _read(HERE / "rows.csv"):
        if not known[one["source"]]["learned"]:
            same.setdefault(_run_of(one), []).append(int(one["bytes"]))
            rows[tuple(one.values())] = one
    for path, number, line in lines_of(paths):
        try:
            row = clean(line)
            if row is None:
                bounds += 1
                continue
            parse(row)
        except (ValueError, KeyError) as wrong:
            print(f"{path}, line {number}: {wrong}", file=sys.stderr)
            refused += 1
            continue
        alike = same.setdefault(_run_of(row), [])
        if any(abs(int(row["bytes"]) / other - 1) < ROUNDING for other in alike):
            continue  # typed twice
        alike.append(int(row["bytes"]))
        rows[tuple(row.values())] = row
        if line.get("license"):
            licenses[row["source"]] = line["license"]
    with open(HERE / "rows.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows.values(), key=lambda row: [row[name] for name in ("source", "op", "model")]))
    with open(HERE / "sources.csv", "w", newline="", encoding="utf-8") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(SOURCE_COLUMNS)
        for source in sorted({row["source"] for row in rows.values()}):
            is_own = source.startswith(("vaemem/", "benchmarks/"))
            publisher = OWN if is_own else re.split("[/:]", source.removeprefix("hf:"))[0]
            address = source if is_own else address_of(source)
            seen = known[source]["seen"] if source in known else time.strftime("%Y-%m")
            out.writerow([source, publisher, address, licenses.get(source, ""), seen, "learned" if is_own else ""])
    print(f"{len(rows)} rows of {len({row['source'] for row in rows.values()})} sources, {refused} lines refused, "
          f"{bounds} bounds left out")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The table that all of vaemem reads and writes: a row is one run of one model at one size."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import operator
import os
import reprlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, overload

from vaemem._common import MIB, OPS, TILED_OPS, as_csv, choose, grouped, is_truth, mib, need, shipped
from vaemem._errors import ArgumentError, ArgumentTypeError, FileError, inside
from vaemem._render import Columns
from vaemem._saving import write
from vaemem.prediction.benchmark import BENCHMARK_TILE

if TYPE_CHECKING:
    import pandas

Row = dict[str, Any]
SOURCES = ("measured", "estimated", "predicted")


class Column(NamedTuple):
    """A column of the schema. `kind` is text, count (>= 1), or number, bytes, seconds or ratio (>= 0)."""

    name: str
    kind: str
    meaning: str


SCHEMA: tuple[Column, ...] = (
    Column("model", "text", "sd15, sdxl, flux ..., or the name of a custom architecture"),
    Column("op", "text", "encode, decode, encode_tiled or decode_tiled; pipeline for a whole pipeline"),
    Column("phase", "text", "of a pipeline: load, encode prompt, encode image, denoise, decode; whole is the largest"),
    Column("height", "count", "of the image, in pixels"),
    Column("width", "count", "of the image, in pixels"),
    Column("batch", "count", "images in one run"),
    Column("frames", "count", "of each video; not known for images"),
    Column("tokens", "count", "of a pipeline's prompt"),
    Column("dtype", "text", "of the activations: float32, float16 or bfloat16"),
    Column("tile", "count", "side of a tile in pixels, for a run in tiles; an image that fits in one tile runs whole"),
    Column("tile_overlap", "ratio", "share of a tile's side that overlaps the next tile, if a program can set it"),
    Column("runtime", "text", "the program that runs it: vaemem, or PyTorch code by name (diffusers, bfl)"),
    Column("way", "text", "how a pipeline runs: its offload and its VAE"),
    Column("device", "text", "cpu, or the GPU's name"),
    Column("source", "text", "measured, estimated (vaemem's own plan) or predicted (another runtime's run)"),
    Column("allocated_bytes", "bytes", "peak in use above the baseline before the run, so without weights and input; "
           "for vaemem activations + scratch + output; for a pipeline's phase everything, weights included"),
    Column("reserved_bytes", "bytes", "peak held from the system or driver, above the same baseline"),
    Column("weights_bytes", "bytes", "the model's weights, in the baseline; for a pipeline's phase those on the card"),
    Column("activations_bytes", "bytes", "part of allocated_bytes at the peak: tensors between passes"),
    Column("scratch_bytes", "bytes", "part of allocated_bytes at the peak: work space and the run's bookkeeping"),
    Column("output_bytes", "bytes", "part of allocated_bytes at the peak: the result handed to the caller"),
    Column("seconds", "seconds", "wall clock of one run"),
    Column("seconds_low", "seconds", "lower end of the band of predicted seconds"),
    Column("seconds_high", "seconds", "upper end of that band"),
    Column("group", "number", "the series of measurements that a row belongs to, if its author numbered them"),
    Column("versions", "text", "of the software that ran: 'name version', separated by commas"),
    Column("work", "ratio", "FLOPs relative to a run without a limit; weights that each task transforms add a tenth"),
    Column("streamed", "number", "tensors of the run that are never whole in memory"),
    Column("limit_bytes", "bytes", "the least memory_limit that allows vaemem's run: reserved_bytes and the weights"),
)  # fmt: skip
COLUMNS: tuple[str, ...] = tuple(column.name for column in SCHEMA)
BYTE_COLUMNS = tuple(column.name for column in SCHEMA if column.kind == "bytes")
_KIND = {column.name: column.kind for column in SCHEMA}
_FLOATS = ("seconds", "ratio")
_REPR = reprlib.Repr()  # values may be of any type, size and depth

# The published benchmark has its own columns: PyTorch, measured, batch 1. It cuts tiles of one side, and does not say
# which of its encodes ran in them.
_BENCHMARK_COLUMNS = {"allocated_mib": "allocated_bytes", "reserved_mib": "reserved_bytes", "time_s": "seconds"}
_BENCHMARK_MODELS = {
    "FLUX": {"model": "flux", "runtime": "bfl"},
    "SD1.5": {"model": "sd15", "runtime": "diffusers"},
    "SDXL": {"model": "sdxl", "runtime": "diffusers"},
}
_BENCHMARK_TILES = {"tile": BENCHMARK_TILE, "tile_overlap": 0.25}


def _value(name: str, value: Any) -> object:
    """Convert `value` for column `name` (missing: None); a ValueError names the column."""
    kind = _KIND[name]
    if value is None or (isinstance(value, str) and not value):
        return None
    if kind == "text":
        if not isinstance(value, str) or not value.isprintable():
            raise ArgumentError(name, "printable text on one line", repr(value)[:80])
        if name == "source":
            choose(name, value[:80], SOURCES)
        return str(value)
    if isinstance(value, str) or is_truth(value):
        raise ArgumentError(name, "a number", repr(value)[:80])
    try:
        # A whole float is taken for an integer: data frames turn integers into floats when a value is missing.
        is_float = kind in _FLOATS or (isinstance(value, float) and value.is_integer())
        number = float(value) if is_float else operator.index(value)
    except (TypeError, ValueError, OverflowError):
        raise ArgumentError(name, f"a {_noun(kind)}", _REPR.repr(value)) from None
    if kind in _FLOATS:
        if not 0 <= number < math.inf:
            raise ArgumentError(name, "a finite number >= 0", repr(value))
        if name == "tile_overlap" and number >= 1:
            raise ArgumentError(name, "a number from 0 to less than 1", repr(value))
        return number
    whole, least = int(number), 1 if kind == "count" else 0
    if whole.bit_length() > 63:
        raise ArgumentError(name, "less than 2^63", f"a number of {whole.bit_length()} bits")
    if whole < least:
        raise ArgumentError(name, f"at least {least}", str(whole))
    return whole


def _noun(kind: str) -> str:
    return "number" if kind in _FLOATS else "whole number"


def _row(values: Mapping[str, object]) -> Row:
    unknown = [repr(name)[:80] for name in values if name not in _KIND]
    if unknown:
        raise ArgumentError("", f"columns out of {', '.join(COLUMNS)}", ", ".join(unknown[:5]))
    return {name: _value(name, values.get(name)) for name in COLUMNS}


def _parse(name: str, text: str) -> tuple[str, object]:
    """Parse a CSV field to a column and its value: a whole number, seconds or text. MiB become whole bytes."""
    column, is_mib = _BENCHMARK_COLUMNS.get(name, name), name.endswith("_mib")
    kind = "ratio" if is_mib else _KIND[column]
    if not text or kind == "text":
        return column, text or None
    try:
        number = float(text) if kind in _FLOATS else int(text)
        return column, round(number * MIB) if is_mib else number
    except (ValueError, OverflowError):
        raise ArgumentError(name, f"a {_noun(kind)}", repr(text[:80])) from None


def in_tiles(row: Mapping[str, Any]) -> bool:
    """Tell whether a run cut its image, by the tile's side in the row; if it has none, by its op."""
    height, width, tile = (row.get(name) for name in ("height", "width", "tile"))
    if height and width and tile:
        return bool(max(height, width) > tile)
    return str(row["op"]).endswith("_tiled")


def as_ran(row: Mapping[str, Any]) -> Row:
    """Return a VAE's row under the op that ran: tiled if the image was cut, otherwise the whole image's, without tiles.
    Rows are compared and grouped this way."""
    if row["op"] not in TILED_OPS:
        return dict(row)
    op = row["op"].removesuffix("_tiled")
    return {**row, "op": f"{op}_tiled"} if in_tiles(row) else {**row, "op": op, "tile": None, "tile_overlap": None}


# Columns that only some runs have, and the form of their values in a name.
_OF_SOME = ("phase", "frames", "tile", "tile_overlap")
_WORDS = {"tile": "tile {}", "tile_overlap": "overlap {:g}", "batch": "batch {}", "tokens": "tokens {}"}
_WORDS |= {"frames": "{} frames"}


def differing(rows: Iterable[Mapping[str, Any]], names: Iterable[str]) -> list[str]:
    """List the columns in which rows differ. A column that only some runs have counts if they differ in it."""
    rows = list(rows)
    found = {name: {row[name] for row in rows} - ({None} if name in _OF_SOME else set()) for name in names}
    return [name for name, values in found.items() if len(values) > 1]


def in_words(row: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Format a row's values for a name: ``"tile 512"``. Leave out a column that only other runs have."""
    told = [name for name in names if row[name] is not None or name not in _OF_SOME]
    return ["-" if row[name] is None else _WORDS.get(name, "{}").format(row[name]) for name in told]


def _with_benchmark_tiles(rows: Sequence[Row]) -> None:
    """Add the tiles in which the benchmark's rows ran. The benchmark left tiling on by mistake, so the rows of its
    encodes do not name tiles. But the allocated bytes of these encodes show the tiles: they do not grow with the
    pixels.

    A row ran in tiles if another row of its series, with at most half its pixels, took nearly as much. Nearly: within a
    factor of the fourth root of the pixels' ratio. A whole image's bytes grow in proportion to its pixels. cuDNN's
    choices change them by a factor of at most 1.4. At the least ratio, 2, only a deviation by 1.7 would look like
    tiles.
    """
    sizes = operator.itemgetter("allocated_bytes", "height", "width")
    series = grouped(
        (row for row in rows if row["op"] in OPS and all(sizes(row))),
        operator.itemgetter("model", "op", "dtype", "device", "batch", "group"),
    )
    cut = [row for row in rows if str(row["op"]).endswith("_tiled")]
    for mine in series.values():
        sized = [(row["height"] * row["width"], row) for row in mine]
        for pixels, row in sized:
            least = [other["allocated_bytes"] * (pixels / few) ** 0.25 for few, other in sized if 2 * few <= pixels]
            if row["allocated_bytes"] < max(least, default=0):
                cut.append(row)
    for row in cut:
        if row["tile"] is None:
            row.update(_BENCHMARK_TILES)


_UNREADABLE = (ValueError, csv.Error, RecursionError)


class Table(Sequence[Row]):
    """Runs and their memory, one row each, in the schema that every part of vaemem shares.

    A table is a sequence of row dictionaries that have every column of `vaemem.Table.columns`; a value that is
    not known is None. Rows are checked when the table is made and handed out as copies, so a table never changes.

    Parameters
    ----------
    rows : Table, pandas.DataFrame or iterable of mappings
        A mapping is column name -> value; columns that are absent become None. Of a data frame NA and NaN become None,
        and the index is left out.

    Raises
    ------
    ValueError
        Unknown column, a value of the wrong kind, negative bytes, or a source other than measured, estimated
        and predicted. The message names the row and the column.

    Notes
    -----
    Sizes are in pixels, memory in bytes, time in seconds. `allocated_bytes` and `reserved_bytes` count the memory that
    a run adds to the baseline before it, which has the weights and the input. `Table.describe()` prints the schema.

    Examples
    --------
    >>> table = Table([{"model": "sdxl", "op": "decode", "height": 512, "width": 512, "allocated_bytes": 100}])
    >>> table[0]["allocated_bytes"], table[0]["seconds"]
    (100, None)
    """

    columns = COLUMNS

    def __init__(self, rows: Iterable[Mapping[str, object]] | pandas.DataFrame = ()) -> None:
        self._rows: list[Row] = []
        if not isinstance(rows, Iterable):
            raise ArgumentError("rows", "mappings of column to value", type(rows).__name__)
        given: Any = rows
        if hasattr(rows, "iterrows"):  # a data frame; pandas is not imported for the question
            given = given.astype(object).where(given.notna(), None).to_dict(orient="records")
        for i, row in enumerate(given):
            with inside("rows", f"row {i}", caught=_UNREADABLE):
                if not isinstance(row, Mapping):
                    raise ArgumentError("", "a mapping of column to value", type(row).__name__)
                self._rows.append(_row(row))

    # ---- a sequence of rows ----

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Table: ...
    def __getitem__(self, index: int | slice) -> Row | Table:
        if isinstance(index, slice):
            return Table(self._rows[index])
        if isinstance(index, str):
            raise ArgumentTypeError(
                "index", "a row's number or a slice", repr(index), f"[row[{index!r}] for row in table] is a column"
            )
        return dict(self._rows[index])

    def __iter__(self) -> Iterator[Row]:
        return (dict(row) for row in self._rows)

    def __eq__(self, other: object) -> bool:
        return self._rows == other._rows if isinstance(other, Table) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __add__(self, other: Table) -> Table:
        return Table([*self._rows, *other._rows]) if isinstance(other, Table) else NotImplemented

    def filter(self, where: Callable[[Row], object] | None = None, /, **equals: object) -> Table:
        """Select the rows with the given values.

        Parameters
        ----------
        where : callable, optional
            Gets a row, says whether to keep it.
        **equals
            Column -> wanted value; a list, tuple or set means any of its values. All must hold.

        Raises
        ------
        ValueError
            A name is no column.

        Examples
        --------
        >>> table = seed_table()
        >>> len(table.filter(op="decode", model=("sd15", "sdxl")))
        30
        >>> len(table.filter(lambda row: row["height"] < 1536, op="encode"))
        21
        """
        unknown = [name for name in equals if name not in _KIND]
        if unknown:
            raise ArgumentError("equals", f"columns out of {', '.join(COLUMNS)}", ", ".join(unknown))
        wanted = {k: v if isinstance(v, list | tuple | set | frozenset) else (v,) for k, v in equals.items()}
        return Table(
            row
            for row in self  # copies: `where` cannot change the table
            if all(row[name] in values for name, values in wanted.items()) and (where is None or where(row))
        )

    # ---- files and data frames; all exact round trips ----

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str | None:
        """Write the table as CSV (UTF-8, a header line, an empty field for None).

        Returns
        -------
        str or None
            The text when `path` is None.

        Examples
        --------
        >>> seed_table().to_csv("table.csv")
        >>> seed_table()[:1].to_csv().splitlines()[0]
        'model,op,phase,height,width,batch,frames,tokens,dtype,...'
        """
        return write(path, as_csv(self._rows, COLUMNS))

    @classmethod
    def from_csv(cls, file: str | os.PathLike[str] | IO[Any], **missing: object) -> Table:
        """Read a table from CSV.

        Parameters
        ----------
        file : path or open file
            Text, or bytes in UTF-8: the columns of the schema in any order, some or all. Or the columns of the
            published PyTorch benchmark (`allocated_mib`, `reserved_mib`, `time_s`, `group`): its models FLUX, SD1.5 and
            SDXL become flux (run by bfl) and sd15, sdxl (run by diffusers), measured, batch 1. Its MiB have two
            decimals, so the bytes are within 5243 of the true ones. Its tiles have 512 pixels a side and overlap by a
            quarter. Encodes also ran in them if their allocated bytes do not grow with the pixels.
        **missing
            Values for columns that the file lacks or leaves empty, such as ``device="RTX 4090"``.

        Raises
        ------
        FileNotFoundError
            No such file.
        ValueError
            Not such a table; the message names the file, the line and the column.

        Examples
        --------
        >>> seed_table().to_csv("table.csv")
        >>> Table.from_csv("table.csv") == seed_table()
        True
        """
        text, name = _read(file)
        with inside("file", path=name, caught=_UNREADABLE):
            reader = csv.DictReader(io.StringIO(text), strict=True)
            header = list(reader.fieldnames or [])
            is_benchmark = any(column in header for column in _BENCHMARK_COLUMNS)
            known = (*COLUMNS, *_BENCHMARK_COLUMNS) if is_benchmark else COLUMNS
            unknown = [repr(column[:80]) for column in header if column not in known]
            if not header or unknown:
                got = f"{', '.join(unknown[:5])}" if unknown else "no header line"
                raise ArgumentError("", f"columns out of {', '.join(known)}", got)
            if len(set(header)) != len(header):
                raise ArgumentError("", "each column once", "one twice")
            rows = []
            for fields in reader:
                with inside("", f"line {reader.line_num}", caught=_UNREADABLE):
                    if None in fields or None in fields.values():
                        raise ArgumentError("", f"{len(header)} fields, as in the header", "another number")
                    if is_benchmark:
                        choose("model", fields.get("model"), _BENCHMARK_MODELS)
                    values = dict(itertools.starmap(_parse, fields.items()))
                    if is_benchmark:
                        values = {"batch": 1, "source": "measured"} | values | _BENCHMARK_MODELS[fields["model"]]
                    rows.append(_row(missing | {k: v for k, v in values.items() if v is not None}))
            if is_benchmark:
                _with_benchmark_tiles(rows)
        return cls(rows)

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str | None:
        """Write the table as JSON: a list of row objects, null for None. Returns the text when `path` is None.

        Examples
        --------
        >>> Table([{"model": "sdxl"}]).to_json()
        '[{"model": "sdxl", "op": null, "phase": null, ...}]\\n'
        """
        rows = ",\n ".join(json.dumps(row, ensure_ascii=False) for row in self._rows)
        return write(path, f"[{rows}]\n")

    @classmethod
    def from_json(cls, file: str | os.PathLike[str] | IO[Any]) -> Table:
        """Read what `to_json` wrote. Raises FileNotFoundError, or ValueError that names the file and the row.

        Examples
        --------
        >>> seed_table().to_json("table.json")
        >>> Table.from_json("table.json") == seed_table()
        True
        """
        text, name = _read(file)
        with inside("file", path=name, caught=_UNREADABLE):
            rows = json.loads(text)
            if not isinstance(rows, list):
                raise ArgumentError("", "a list of rows", type(rows).__name__)
            return cls(rows)

    def to_markdown(self) -> str:
        """Format as `print` does, as a Markdown table with every column that has a value.

        Examples
        --------
        >>> print(estimate_sweep("sdxl", "decode", 512).to_markdown())
        | model | op     | height | width | ...
        """
        return self._shown().markdown()

    def to_pandas(self) -> pandas.DataFrame:
        """Convert to a pandas.DataFrame with every column of the schema.

        Numbers are int64 and float64; a column that lacks some has pandas' nullable Int64 or Float64, so that bytes
        stay whole. Needs pandas (``pip install 'vaemem[table]'``).

        Examples
        --------
        >>> seed_table().to_pandas().groupby("op")["seconds"].max()["encode"]
        np.float64(0.992)
        """
        pd = need("pandas", "to_pandas")
        columns = {}
        for name in COLUMNS:
            values = [row[name] for row in self._rows]
            dtype = {"text": "object", "seconds": "float64", "ratio": "float64"}.get(_KIND[name], "int64")
            if dtype != "object" and None in values:
                dtype = dtype.capitalize()
            columns[name] = pd.Series(values, dtype=dtype)
        return pd.DataFrame(columns)

    @classmethod
    def from_pandas(cls, frame: pandas.DataFrame) -> Table:
        """Make ``Table(frame)``; ValueError for anything but a pandas.DataFrame.

        Examples
        --------
        >>> Table.from_pandas(seed_table().to_pandas()) == seed_table()
        True
        """
        if not hasattr(frame, "iterrows"):
            raise ArgumentError("frame", "a pandas.DataFrame", type(frame).__name__)
        return cls(frame)

    # ---- for people ----

    @staticmethod
    def describe() -> str:
        """Explain each column, in aligned text.

        Examples
        --------
        >>> print(Table.describe())
        column             kind     meaning
        model              text     sd15, sdxl, flux ..., or the name of a custom architecture
        ...
        """
        return Columns(("column", "kind", "meaning"), SCHEMA).text()

    def _shown(self, left_out: Container[str] = (), title: str = "") -> Columns:
        """Make the columns with values, without the long versions. Bytes are in MiB, seconds with their band. Leave out
        the middle of a long table."""
        hidden = ("versions", "seconds_low", "seconds_high")  # the last two are shown with the seconds
        held = [name for name in COLUMNS if name not in hidden and any(row[name] is not None for row in self._rows)]
        shown = [name for name in held if name not in left_out]
        rows = self._rows if len(self) <= 24 else [*self._rows[:10], {}, *self._rows[-10:]]
        header = [name.replace("_bytes", " MiB") for name in shown]
        cells = [[_cell(name, row[name]) + _band(name, row) if row else "…" for name in shown] for row in rows]
        return Columns(header, cells, title=title)

    def _captioned(self) -> Columns:
        """Make a table with a caption: values common to several rows, but not sizes, are in the caption."""
        sizes = ("height", "width", "versions")
        kinds = [name for name in COLUMNS if _KIND[name] in ("text", "count") and name not in sizes]
        found = {name: {row[name] for row in self._rows} for name in kinds if len(self) > 1}
        common = {name: values.pop() for name, values in found.items() if len(values) == 1 and None not in values}
        said = ", ".join(f"{name} {_cell(name, value)}" for name, value in common.items())
        count = f"Table, {len(self)} row{'' if len(self) == 1 else 's'}"
        return self._shown(common, f"{count}; in each: {said}" if said else count)

    def __repr__(self) -> str:
        return self._captioned().text()

    def _repr_html_(self) -> str:
        return self._captioned().html()


def seed_table() -> Table:
    """Load the published PyTorch benchmark that comes with vaemem. Predictions are checked against it.

    Returns
    -------
    Table
        98 measured rows: flux run by bfl, sd15 and sdxl by diffusers, on an RTX 4090 with torch 2.7.1+cu128 and cuDNN
        9.7.1; encode, decode and decode_tiled from 512x512 to 2048x2048 in float16, bfloat16 and float32. Its MiB have
        two decimals, so the bytes are within 5243 of the true ones. Eight encodes ran in tiles, as their column `tile`
        says.

    Examples
    --------
    >>> seed_table().filter(model="sdxl", op="decode", height=1024, dtype="float16")[0]["reserved_bytes"] / 2**20
    4274.0
    """
    return Table.from_csv(io.StringIO(shipped("seed_table.csv")))


def check_complete(table: Table, target: str) -> None:
    """Raise a ValueError that names the first row without a complete run, or without the target."""
    for i, row in enumerate(table):
        lacking = [name for name in ("model", "op", "height", "width", "dtype", target) if row[name] is None]
        if lacking:
            raise ArgumentError("table", ", ".join(lacking), "none", "filter such rows out", f"row {i}")


def _band(name: str, row: Mapping[str, Any]) -> str:
    """Format the band in the cell of predicted seconds."""
    low, high = row["seconds_low"], row["seconds_high"]
    return f" ({low:.2g} to {high:.2g})" if name == "seconds" and low is not None and high is not None else ""


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name == "limit_bytes":
        return f"{math.ceil(value * 100 / MIB) / 100:.2f}"  # rounded up: the number shown works as a limit
    if _KIND[name] == "bytes":
        return mib(value)
    if _KIND[name] in _FLOATS:
        return f"{value:.3f}"
    text = str(value)
    return text if len(text) <= 32 else text[:31] + "…"


def _read(file: str | os.PathLike[str] | IO[Any]) -> tuple[str, str]:
    """Read the text of a path, or of an open file of text or bytes; return it with a name for messages."""
    if isinstance(file, str | os.PathLike):
        content, name = Path(file).read_bytes(), os.fspath(file)
    elif hasattr(file, "read"):
        content, name = file.read(), str(getattr(file, "name", "the text"))
    else:
        raise ArgumentError("file", "a path or an open file", type(file).__name__)
    try:
        text = content if isinstance(content, str) else str(content, "utf-8")
    except UnicodeDecodeError as error:
        raise FileError("file", "UTF-8 text", "other bytes", str(error), path=name) from None
    return text.removeprefix("\ufeff"), name

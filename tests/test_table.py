"""The table: what it accepts, what it refuses by name, and exact round trips."""

import io
import json
import math
import operator
import re
import sys
from importlib import resources

import numpy as np
import pytest
from errors import refused

import vaemem
from vaemem import Table, _common, compare, fit, report
from vaemem._common import need
from vaemem._render import Columns
from vaemem.tables.table import COLUMNS, as_ran, in_tiles

pytestmark = pytest.mark.python

ROW = {"model": "sdxl", "op": "decode", "height": 512, "width": 768, "batch": 1, "dtype": "float32"}
FULL = ROW | {
    "runtime": "vaemem", "device": "cpu", "source": "measured", "allocated_bytes": 2**53 + 1, "reserved_bytes": 0,
    "weights_bytes": 334_893_056, "activations_bytes": 3, "scratch_bytes": 2, "output_bytes": 1, "seconds": 0.1 + 0.2,
    "seconds_low": 0.25, "seconds_high": 0.5, "phase": "decode", "frames": 81, "tokens": 77,
    "way": "offload none, VAE whole",
    "tile": 512, "tile_overlap": 0.1875,
    "group": 3, "versions": 'vaemem 0.1, "x" | <b>, é', "work": 1.25, "streamed": 0, "limit_bytes": 4,
}  # fmt: skip

# Lines of the published benchmark, as they stand there.
BENCHMARK = """model,op,height,width,dtype,allocated_mib,reserved_mib,time_s,group
FLUX,decode,512,512,float16,546.12,1068.00,0.033,1
SD1.5,encode,512,512,float16,384.28,534.40,0.018,1
SDXL,decode,2048,2048,float32,15364.05,20535.60,1.407,3
"""


def mixed() -> Table:
    """One row that holds everything, one that holds little."""
    return Table([FULL, ROW])


def test_the_columns_that_scripts_rely_on():
    assert COLUMNS == Table.columns == (
        "model", "op", "phase", "height", "width", "batch", "frames", "tokens", "dtype", "tile", "tile_overlap",
        "runtime", "way", "device", "source", "allocated_bytes",
        "reserved_bytes", "weights_bytes", "activations_bytes", "scratch_bytes", "output_bytes", "seconds",
        "seconds_low", "seconds_high", "group", "versions", "work", "streamed", "limit_bytes",
    )  # fmt: skip
    assert all(name in Table.describe() for name in COLUMNS)


def test_rows_have_every_column():
    table = Table([ROW])
    assert list(table[0]) == list(COLUMNS)
    assert table[0]["seconds"] is None and table[0]["height"] == 512
    assert Table([FULL])[0] == FULL


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"colour": 1}, ("'colour'", "row 1")),
        ({"source": "guessed"}, ("'guessed'", "row 1: source")),
        ({"allocated_bytes": -1}, (-1, "row 1: allocated_bytes")),
        ({"allocated_bytes": 10**400}, (None, "row 1: allocated_bytes")),
        ({"allocated_bytes": 1e300}, (None, "row 1: allocated_bytes")),
        ({"seconds": 10**400}, (None, "row 1: seconds")),
        ({"\x1b[2J": 1}, ("'\\x1b[2J'", "row 1")),
        ({"allocated_bytes": 1.5}, (1.5, "row 1: allocated_bytes")),
        ({"allocated_bytes": "12"}, ("'12'", "row 1: allocated_bytes")),
        ({"allocated_bytes": math.nan}, ("nan", "row 1: allocated_bytes")),
        ({"height": 0}, (0, "row 1: height")),
        ({"batch": True}, ("True", "row 1: batch")),
        ({"seconds": -0.5}, (-0.5, "row 1: seconds")),
        ({"seconds": math.nan}, ("nan", "row 1: seconds")),
        ({"seconds": [1]}, ("[1]", "row 1: seconds")),
        ({"model": 15}, (15, "row 1: model")),
        ({"versions": "a\nb"}, ("'a\\nb'", "row 1: versions")),
        (["model"], ("list", "row 1")),
    ],
)
def test_bad_rows_are_named(bad, message):
    with refused("rows", *message):
        Table([ROW, bad])


def test_numpy_numbers_and_whole_floats_become_ints():
    row = Table([{"height": np.int32(8), "allocated_bytes": 4096.0, "seconds": np.float32(0.5)}])[0]
    assert (type(row["height"]), type(row["allocated_bytes"]), type(row["seconds"])) == (int, int, float)


def test_a_sequence_that_does_not_change():
    table = mixed()
    table[0]["model"] = "changed"
    for row in table:
        row["model"] = "changed"
    table.filter(lambda row: row.update(model="changed"))
    assert table[0]["model"] == table[-1]["model"] == "sdxl" and len(table) == 2
    assert isinstance(table[:1], Table) and len(table[:1]) == 1
    assert len(table + table) == 4 and (table + table)[3] == table[1]
    assert table == mixed() and table != table[:1]
    with pytest.raises(TypeError):
        operator.add(table, [ROW])


def test_filter():
    table = Table([ROW | {"op": op, "height": height} for op in ("encode", "decode") for height in (256, 512, 1024)])
    assert [row["height"] for row in table.filter(op="decode")] == [256, 512, 1024]
    assert len(table.filter(op="decode", height=(256, 512))) == 2
    assert len(table.filter(lambda row: row["height"] > 256, op="encode")) == 2
    assert len(table.filter(seconds=None)) == 6
    assert len(table.filter(op="tiled")) == 0
    with refused("equals", "size"):
        table.filter(size=512)


@pytest.mark.parametrize("form", ["csv", "json"])
@pytest.mark.parametrize("table", [mixed(), Table([ROW]), Table()], ids=["mixed", "sparse", "empty"])
def test_text_round_trips_are_exact(tmp_path, form, table):
    to, back = getattr(table, f"to_{form}"), getattr(Table, f"from_{form}")
    path = tmp_path / f"table.{form}"
    assert to(path) is None
    again = back(path)
    assert again == table
    assert [[type(value) for value in row.values()] for row in again] == [[*map(type, row.values())] for row in table]
    assert back(io.StringIO(to())) == table and to() == path.read_text("utf-8")


def test_json_is_a_list_of_rows():
    assert json.loads(mixed().to_json())[1]["seconds"] is None


@pytest.mark.parametrize("table", [mixed(), Table([ROW]), Table()], ids=["mixed", "sparse", "empty"])
def test_pandas_round_trip_is_exact(table):
    pytest.importorskip("pandas")
    frame = table.to_pandas()
    assert list(frame.columns) == list(COLUMNS) and len(frame) == len(table)
    assert Table.from_pandas(frame) == Table(frame) == table


def test_pandas_keeps_bytes_whole():
    pytest.importorskip("pandas")
    frame = mixed().to_pandas()
    assert str(frame["allocated_bytes"].dtype) == "Int64"  # one value is missing
    assert frame["allocated_bytes"][0] == 2**53 + 1  # a float64 would have lost the 1
    assert str(mixed()[:1].to_pandas()["allocated_bytes"].dtype) == "int64"


def test_pandas_with_a_foreign_column_is_refused():
    pd = pytest.importorskip("pandas")
    with refused("rows", "'ratio'", "row 0"):
        Table.from_pandas(pd.DataFrame({"model": ["sdxl"], "ratio": [1.0]}))


def test_csv_takes_some_columns_in_any_order():
    table = Table.from_csv(io.StringIO("seconds,model\n1.5,sdxl\n,\n"), device="cpu", model="flux")
    assert [(row["model"], row["seconds"], row["device"]) for row in table] == [
        ("sdxl", 1.5, "cpu"),
        ("flux", None, "cpu"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ()),
        (f"height\n{'9' * 400}\n", (None, "line 2: height")),
        (f"height\n{'9' * 5000}\n", (None, "line 2: height")),
        (f"seconds\n{'9' * 400}\n", ("inf", "line 2: seconds")),
        ("\x1b[2J\n1\n", ("'\\x1b[2J'",)),
        ("model,colour\nsdxl,red\n", ("'colour'",)),
        ("model,model\na,b\n", ()),
        ("model,height\nsdxl,512\nsdxl,5x\n", ("'5x'", "line 3: height")),
        ("model,seconds\nsdxl,fast\n", ("'fast'", "line 2: seconds")),
        (BENCHMARK.splitlines()[0] + "\nSDXL,decode,8,8,float16,1,1,fast,1\n", ("'fast'", "line 2: time_s")),
        ("model,height\nsdxl\n", (None, "line 2")),
        ("model,height\nsdxl,512,3\n", (None, "line 2")),
        ("model,height\nsdxl,-8\n", (-8, "line 2: height")),
        ('model,height\n"sdxl,512\n', ()),
        ("model,allocated_mib\nSD3,1.0\n", ("'SD3'", "line 2: model")),
        ("model,allocated_mib\nSDXL,many\n", ("'many'", "line 2: allocated_mib")),
        ("model,allocated_mib\nSDXL,nan\n", ("'nan'", "line 2: allocated_mib")),
    ],
)
def test_bad_csv_is_named(tmp_path, text, message):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with refused("file", *message) as caught:
        Table.from_csv(path)
    assert str(path) in str(caught.value)


def test_a_byte_order_mark_is_no_text(tmp_path):
    for text, read in ((mixed().to_csv(), Table.from_csv), (mixed().to_json(), Table.from_json)):
        path = tmp_path / "marked"
        path.write_text(text, "utf-8-sig")
        assert read(path) == read(io.StringIO("\ufeff" + text)) == mixed()
        assert read(io.BytesIO(path.read_bytes())) == read(io.BytesIO(text.encode())) == mixed()


@pytest.mark.parametrize("read", [Table.from_csv, Table.from_json])
def test_files_that_are_no_text(tmp_path, read):
    path = tmp_path / "binary"
    path.write_bytes(b"\xff\xfe\x00\x01")
    with refused("file", path=path):
        read(path)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "absent")


@pytest.mark.parametrize(
    ("text", "message"),
    [("{}", ("dict",)), ("[1]", ("int", "rows: row 0")), ("[", ()),
     ("[" * 100_000, ())],
)  # fmt: skip
def test_bad_json_is_named(tmp_path, text, message):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with refused("file", *message):
        Table.from_json(path)


def test_spreadsheets_may_put_a_byte_order_mark(tmp_path):
    path = tmp_path / "bom.csv"
    path.write_bytes(b"\xef\xbb\xbfmodel,height\r\nsdxl,512\r\n")
    assert Table.from_csv(path)[0]["model"] == "sdxl"


def test_the_published_benchmark():
    flux, sd15, sdxl = Table.from_csv(io.StringIO(BENCHMARK), device="RTX 4090")
    assert (flux["model"], flux["runtime"], flux["batch"], flux["source"]) == ("flux", "bfl", 1, "measured")
    assert (sd15["model"], sd15["runtime"], sdxl["model"], sdxl["runtime"]) == (
        "sd15",
        "diffusers",
        "sdxl",
        "diffusers",
    )
    assert flux["reserved_bytes"] == 1068 * 2**20 and flux["seconds"] == 0.033
    assert (sdxl["group"], sdxl["device"], sdxl["weights_bytes"]) == (3, "RTX 4090", None)
    for row, mib in ((flux, "546.12"), (sd15, "384.28"), (sdxl, "15364.05")):
        assert f"{row['allocated_bytes'] / 2**20:.2f}" == mib  # to the decimals that were published


def test_the_benchmark_that_comes_with_vaemem():
    """It names its card, and a copy without that has the same rows once the card is said."""
    table = vaemem.seed_table()
    path = resources.files("vaemem") / "data" / "seed_table.csv"
    assert Table.from_csv(str(path)) == table
    bare = [line.split(",NVIDIA")[0].replace(",device,versions", "") for line in path.read_text("utf-8").splitlines()]
    said = {"device": "NVIDIA GeForce RTX 4090", "versions": "torch 2.7.1+cu128, cudnn 9.7.1"}
    assert Table.from_csv(io.StringIO("\n".join(bare)), **said) == table
    assert len(table) == 98 and {row["source"] for row in table} == {"measured"}
    assert {(row["model"], row["runtime"]) for row in table} == {
        ("flux", "bfl"),
        ("sd15", "diffusers"),
        ("sdxl", "diffusers"),
    }
    assert {row["device"] for row in table} == {vaemem.predict("flux", "decode", 64, 64, gpu="RTX 4090").gpu}
    # The benchmark's own line: SDXL,decode,1024,1024,float16,2434.22,4274.00,0.156,1
    (row,) = table.filter(model="sdxl", op="decode", height=1024, dtype="float16", group=1)
    assert row["reserved_bytes"] == 4274 * 2**20 and abs(row["allocated_bytes"] - 2434.22 * 2**20) <= 5243


def test_the_benchmark_says_by_its_bytes_which_encodes_ran_in_tiles():
    table = vaemem.seed_table()
    cut = table.filter(tile=512)
    assert {row["tile"] for row in table} == {None, 512} and {row["tile_overlap"] for row in cut} == {0.25}
    assert {row["op"] for row in cut} == {"encode", "decode_tiled"} and len(cut.filter(op="encode")) == 8
    wanted = (row for row in table if row["op"] == "encode" and row["model"] != "flux" and row["height"] >= 1536)
    assert cut.filter(op="encode") == Table(wanted) and table.filter(op="decode_tiled") == cut.filter(op="decode_tiled")

    def ran_tiled(*sizes, **groups):
        lines = [f"SDXL,encode,{s},{s},float16,{mib},{mib},1,{groups.get(f'at_{s}', 1)}" for s, mib in sizes]
        read = Table.from_csv(io.StringIO("\n".join([BENCHMARK.splitlines()[0], *lines])))
        return [in_tiles(row) for row in read]

    assert ran_tiled((512, 384), (768, 864), (1024, 1536), (1536, 3456)) == [False] * 4
    assert ran_tiled((512, 384), (768, 864), (1536, 385), (2048, 386)) == [False, False, True, True]
    # A convolution's workspace may be half as large again at one size: no tiles. Nor does another series tell any.
    assert ran_tiled((512, 384), (736, 560)) == ran_tiled((512, 384), (1536, 385), at_1536=2) == [False, False]


def test_a_row_counts_under_the_op_that_ran():
    def ran(op, side, tile):
        row = ROW | {"op": op, "height": side, "width": side, "tile": tile}
        return tuple(as_ran(Table([row])[0])[name] for name in ("op", "tile"))

    assert ran("decode_tiled", 1024, 512) == ("decode_tiled", 512) and ran("encode", 1024, 512) == ("encode_tiled", 512)
    assert ran("decode_tiled", 512, 512) == ran("decode", 512, 512) == ("decode", None)
    assert ran("decode_tiled", 512, None) == ("decode_tiled", None), "tables that are older say no tile"
    assert ran("pipeline", 512, None) == ("pipeline", None) and ran(None, 512, 256) == (None, 256)


def test_files_without_tiles_are_read():
    held = [name for name in COLUMNS if not name.startswith("tile")]
    older = _common.as_csv([{name: FULL[name] for name in held}], held)
    assert Table.from_csv(io.StringIO(older)) == Table([FULL | {"tile": None, "tile_overlap": None}])


def test_what_people_see():
    text = repr(mixed())
    assert text.startswith("Table, 2 rows; in each: ") and "allocated MiB" in text and "8589934592.00" in text
    assert "seconds" not in repr(Table([ROW])), "columns that hold nothing are left out"
    assert repr(Table()) == "Table, 0 rows"
    shown = repr(Table([ROW] * 1000)).partition("\nheight")[2].splitlines()
    assert len(shown) == 22  # header, 10, a gap, 10
    page = Table([ROW | {"model": "<b>"}, ROW])._repr_html_()
    assert "&lt;b&gt;" in page and "<b>" not in page and page.count("<tr>") == 3
    assert "versions" not in text + page, "longer than all others together"


def test_what_all_rows_have_in_common_is_said_once():
    one, two = ROW | {"dtype": "float16", "width": 8}, ROW | {"dtype": "float16", "width": 16}
    above, head = Table([one, two])._repr_html_().split("<table>")
    assert "float16" not in head and "dtype float16" in above and ">width</th>" in head
    caption, lines = repr(Table([one, two])).split("\nheight")
    assert "; in each: model " in caption and "dtype float16" in caption and "float16" not in lines
    above, head = Table([one, two | {"dtype": "float32"}])._repr_html_().split("<table>")
    assert ">float16</td>" in head and ">float32</td>" in head and "dtype" not in above
    assert ">height</th>" in head, "a size stays, though all have it"
    assert "in each" not in repr(Table([one])) and "float16" in repr(Table([one])).splitlines()[-1]


def test_a_table_of_pipelines_is_as_narrow_as_a_terminal():
    table = Table(vaemem.predict_pipeline("sd15", 512, 512, gpu="T4").rows())
    caption, *lines = repr(table).split("\nphase")
    assert "way offload none, VAE whole, device Tesla T4, source predicted" in " ".join(caption.split())
    assert caption.startswith("Table, 5 rows; in each") and max(map(len, lines[0].splitlines())) <= 125
    assert re.search(r" \d+\.\d{3} \(\d+(\.\d+)? to \d+(\.\d+)?\)$", lines[-1]), "seconds with their band"


def test_columns_align():
    table = Columns(("name", "value"), [("a", "1"), ("long|er*", "-23.5")])
    assert table.text() == "name      value\na             1\nlong|er*  -23.5"
    assert table.markdown().splitlines() == [
        "| name       | value |",
        "| ---------- | ----: |",
        "| a          |     1 |",
        r"| long\|er\* | -23.5 |",
    ]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda frame: Table(5), ("rows", "int")),
        (lambda frame: Table(frame.rename(columns={"op": "what"})), ("rows", "'what'", "row 0")),
        (lambda frame: Table.from_csv(5), ("file", "int")),
        (lambda frame: Table.from_pandas(5), ("frame", "int")),
        (lambda frame: compare(5), ("rows", "int")),
        (lambda frame: fit([1]), ("rows", "int", "row 0")),
    ],
)
def test_what_is_no_table_is_named(call, message):
    frame = pytest.importorskip("pandas").DataFrame([ROW])
    with refused(*message):
        call(frame)


def test_rows_and_data_frames_are_taken_as_tables():
    pytest.importorskip("pandas")
    table = vaemem.seed_table().filter(model="sdxl", op="decode", dtype="float16")
    frame, rows = table.to_pandas(), list(table)
    for given in (frame, rows, iter(rows)):
        assert str(fit(given)) == str(fit(table))
    assert str(compare(frame)) == str(compare(rows)) == str(compare(table))
    assert str(report(frame)) == str(report(iter(rows))) == str(report(table))


def test_a_column_is_no_row():
    with refused("index", "'height'", kind=TypeError):
        mixed()["height"]


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with refused(kind=ImportError, packages=("pandas",), install="pip install 'vaemem[table]'"):
        mixed().to_pandas()
    with refused(kind=ImportError, packages=("no_such_package",), install="pip install 'vaemem[demo]'"):
        need("no_such_package", "x")

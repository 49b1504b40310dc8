"""Opening datasets: what cannot be read is one clear sentence, what can be read is read whole."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import dataset, steps_table, write_part, write_run

from kvcanary_trace.analysis import analyze, load, open_dataset
from kvcanary_trace.errors import DatasetError, SchemaError
from kvcanary_trace.schema import STEPS


def test_missing_folder(tmp_path: Path) -> None:
    """The path that was given is named."""
    with pytest.raises(DatasetError, match=r"nowhere does not exist"):
        analyze(tmp_path / "nowhere")


def test_file_instead_of_folder(tmp_path: Path) -> None:
    """A part is not a dataset."""
    path = write_part(tmp_path, steps_table(3))
    with pytest.raises(DatasetError, match="is a file; give the folder"):
        analyze(path)


def test_empty_folder_and_empty_run(tmp_path: Path) -> None:
    """Nothing at all, and a run that has not recorded a step, are told apart."""
    with pytest.raises(DatasetError, match="holds no trace"):
        analyze(tmp_path)
    write_run(tmp_path, run="rx", status="running")
    with pytest.raises(DatasetError, match="no recorded steps yet, only the run files of rx"):
        analyze(tmp_path)


def test_part_with_no_rows(tmp_path: Path) -> None:
    """A sealed part without rows is no dataset either."""
    with pytest.raises(DatasetError, match="no recorded steps"):
        analyze(dataset(tmp_path, steps_table(0)))


def test_foreign_parquet(tmp_path: Path) -> None:
    """Parquet that is not ours is named, with the column it lacks."""
    dataset(tmp_path, steps_table(3))
    pq.write_table(pa.table({"price": [1.0]}), tmp_path / "steps" / "run=r1" / "rank=0" / "part-9.parquet")
    with pytest.raises(DatasetError, match=r"part-9.parquet is not a steps file of kvcanary-trace: .* 'step'"):
        analyze(tmp_path)


def test_foreign_parquet_with_a_column_of_our_name(tmp_path: Path) -> None:
    """A column of our name and another type is refused before a query trips over it."""
    table = steps_table(3)
    at = table.schema.get_field_index("bs")
    write_part(tmp_path, table.set_column(at, "bs", pa.array(["a", "b", "c"])))
    with pytest.raises(SchemaError, match="has column 'bs' as string, the record as int64"):
        analyze(tmp_path)


def test_parquet_out_of_place(tmp_path: Path) -> None:
    """A file right under steps/ belongs to no run: it is not silently read or left out."""
    dataset(tmp_path, steps_table(3))
    pq.write_table(steps_table(3), tmp_path / "steps" / "copy.parquet")
    with pytest.raises(DatasetError, match=r"copy.parquet is not where parts belong"):
        analyze(tmp_path)


@pytest.mark.parametrize("kept", [0, 4, 100, -9, -1])
def test_truncated_file(tmp_path: Path, kept: int) -> None:
    """Wherever a part was cut off, it is named and nothing else is read."""
    write_part(tmp_path, steps_table(500))
    path = write_part(tmp_path, steps_table(500), part=1)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DatasetError, match=r"part-00001.parquet is truncated or not a Parquet file"):
        analyze(tmp_path)


def test_damaged_inside(tmp_path: Path) -> None:
    """A footer that is whole over pages that are not: found while reading, and the file is named."""
    rng = np.random.default_rng(0)
    path = write_part(tmp_path, steps_table(5000, bs=rng.integers(0, 200, 5000)))
    data = bytearray(path.read_bytes())
    data[200 : len(data) // 2] = bytes(len(data) // 2 - 200)
    path.write_bytes(bytes(data))
    with pytest.raises(DatasetError) as caught:
        analyze(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_newer_schema(tmp_path: Path) -> None:
    """A file or run file of a newer version says so, and what to do."""
    table = steps_table(3).replace_schema_metadata({"kvcanary_trace.schema": "7"})
    write_part(tmp_path / "file", table)
    with pytest.raises(SchemaError, match=r"part-00000.parquet is schema 7, this reader knows 1; upgrade"):
        analyze(tmp_path / "file")
    dataset(tmp_path / "run", steps_table(3), schema=7)
    with pytest.raises(SchemaError, match=r"r1.0.json is schema 7"):
        analyze(tmp_path / "run")


def test_bad_run_file(tmp_path: Path) -> None:
    """A run file that is no JSON, or no run file, is named."""
    dataset(tmp_path, steps_table(3))
    path = tmp_path / "runs" / "r1.0.json"
    for text in ("{", "[]", json.dumps({"schema": 1})):
        path.write_text(text)
        with pytest.raises(DatasetError, match=r"r1.0.json is not a run file"):
            analyze(tmp_path)


def test_without_run_file(tmp_path: Path) -> None:
    """Parts alone can be analysed: what the run file would tell is unknown, not invented."""
    write_part(tmp_path, steps_table(3))
    analysis = analyze(tmp_path)
    assert [(run.run, run.rank, run.status) for run in analysis.runs] == [("r1", 0, None)]
    assert analysis.to_json()["losses"] == {"rows_missing": 0}


@pytest.mark.parametrize("name", ["it's", "[1]", "a*b?c", "{x,y} z", "käse"])
def test_odd_folder_names(tmp_path: Path, name: str) -> None:
    """Whatever signs a path has, it is a path and no pattern."""
    assert analyze(dataset(tmp_path / name, steps_table(7))).rows == 7


def test_older_file_without_a_column(tmp_path: Path) -> None:
    """A file that lacks a column of today is read: the column is null there, also beside newer files."""
    write_part(tmp_path, steps_table(3).drop_columns(["kv_used", "waiting_reqs"]))
    assert analyze(tmp_path).rows == 3
    write_part(tmp_path, steps_table(3, step=np.arange(3) + 3, kv_used=7, kv_capacity=10), part=1)
    assert load(tmp_path, columns=["step", "kv_used"]).to_pydict() == {
        "step": [0, 1, 2, 3, 4, 5], "kv_used": [None, None, None, 7, 7, 7],
    }  # fmt: skip


def test_load_is_ordered_and_typed(tmp_path: Path) -> None:
    """`load` gives the record's columns, run and rank, in order of steps."""
    write_part(tmp_path, steps_table(4, step=np.array([2, 3, 0, 1])), run="rb", rank=1)
    write_part(tmp_path, steps_table(1), run="ra")
    table = load(tmp_path)
    assert table.column_names == [*(column.name for column in STEPS.columns), "run", "rank"]
    assert table["step"].to_pylist() == [0, 0, 1, 2, 3] and table["run"].to_pylist() == ["ra", *["rb"] * 4]
    assert table.schema.field("bs").type == pa.int64() and table["rank"].type == pa.int64()
    assert load(tmp_path, "violations").num_rows == 0
    with pytest.raises(ValueError, match="table must be one of steps"):
        load(tmp_path, "launches")
    with pytest.raises(ValueError, match="no column 'batch'"):
        load(tmp_path, columns=["batch"])


def test_live_tail_is_read_beside_parts(tmp_path: Path) -> None:
    """Rows that no part has yet count too; a tail whose part exists is not read twice; a torn end is left out."""
    from kvcanary_trace.sinks.live import Encoder, TailFile, live_path

    write_part(tmp_path, steps_table(10))
    encoder = Encoder(STEPS.arrow)
    for part in (0, 1):  # part 0 is sealed already
        path = live_path(tmp_path, "steps", "r1", 0, 4711, part)
        tail = TailFile(path, encoder.header)
        rows = steps_table(5, step=np.arange(5) + 10, seq=np.arange(5) + 11, bs=200)
        for batch in rows.to_batches():
            tail.append(encoder.encode(batch))
        tail.close()
    with path.open("ab") as file:
        file.write(b"torn")
    data = open_dataset(tmp_path)
    assert (data.rows, data.step_range) == (15, (0, 14))
    analysis = analyze(tmp_path)
    assert analysis.steps == (0, 14) and analysis.rows == 15
    assert max(one.peak_utilization or 0 for one in analysis.findings if one.capacity == "write_req") == 200 / 256


def test_only_a_live_tail(tmp_path: Path) -> None:
    """A process that was killed before its first part was sealed leaves a dataset."""
    from kvcanary_trace.sinks.live import Encoder, TailFile, live_path

    encoder = Encoder(STEPS.arrow)
    tail = TailFile(live_path(tmp_path, "steps", "r1", 0, 4711, 0), encoder.header)
    tail.append(encoder.encode(steps_table(8).to_batches()[0]))
    tail.close()
    assert analyze(tmp_path).rows == 8


def test_tail_that_is_sealed_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer seals a tail between our two looks: its rows are read once, neither twice nor not at all."""
    import kvcanary_trace.analysis.dataset as module
    from kvcanary_trace.sinks.live import Encoder, TailFile, live_path

    write_part(tmp_path, steps_table(10))
    rows = steps_table(5, step=np.arange(5) + 10, seq=np.arange(5) + 11)
    encoder = Encoder(STEPS.arrow)
    tail = TailFile(live_path(tmp_path, "steps", "r1", 0, 4711, 1), encoder.header)
    tail.append(encoder.encode(rows.to_batches()[0]))
    read_tails = module.read_tails

    def seal_after_reading(root: Path) -> object:
        found = read_tails(root)
        write_part(root, rows, part=1)
        tail.remove()
        return found

    monkeypatch.setattr(module, "read_tails", seal_after_reading)
    assert analyze(tmp_path).rows == 15

"""The black box: what a dead process published is recovered whole, a live one is watched and left alone."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import launches
import numpy as np
import pytest
from typer.testing import CliRunner

import kvcanary_trace as kv_canary
from kvcanary_trace import black_box
from kvcanary_trace.black_box import HEADER_BYTES, MAGIC, HeaderWord, find_boxes
from kvcanary_trace.cli import app
from kvcanary_trace.errors import DatasetError, SettingError
from kvcanary_trace.watch import Watcher, pick_box

pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no shared memory on this system")

ROW = {"mode": "decode", "bs": 3, "write_req_capacity": 8, "verify_demand": 70, "verify_capacity": 60}


@pytest.fixture(autouse=True)
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for shared memory, so that tests do not meet each other's boxes."""
    root = tmp_path / "shm"
    root.mkdir()
    monkeypatch.setattr(black_box, "SHM", root)
    return root


def program(code: str, *arguments: object, shm: Path) -> subprocess.Popen[str]:
    """A process that traces with its black box in `shm`; its standard output and input are pipes."""
    head = f"from pathlib import Path; from kvcanary_trace import black_box; black_box.SHM = Path({str(shm)!r})\n"
    return subprocess.Popen(
        [sys.executable, "-c", head + textwrap.dedent(code), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def command(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(one) for one in arguments])
    return done.exit_code, done.output


ENDLESS = """
    import sys, time
    import kvcanary_trace as kv_canary
    with kv_canary.trace(sys.argv[1], black_box=True, ring_rows=65536, flush_interval_s=float(sys.argv[2])) as session:
        number = 0
        while True:
            session.record(step=number, mode="decode", bs=3, verify_demand=70, write_req_capacity=8, verify_capacity=60)
            number += 1
            if number % 100 == 0:
                print(number, flush=True)
                time.sleep(0.002)  # an engine waits for its device; a loop that never waits starves the drain
"""


@contextlib.contextmanager
def running(directory: Path, shm: Path, flush_s: float = 0.05) -> Iterator[subprocess.Popen[str]]:
    """A process that records for ever, some hundred rows in."""
    process = program(ENDLESS, directory, flush_s, shm=shm)
    try:
        assert process.stdout is not None
        for _ in range(10):
            process.stdout.readline()
        while flush_s < 1 and not list(directory.glob("_live/steps.*.arrows")):
            process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("flush_s", [0.02, 600.0], ids=["rows on disk", "all rows in the rings"])
def test_kill_loses_no_published_row(tmp_path: Path, shm: Path, flush_s: float) -> None:
    """Killed at any moment: steps 0 to the last are there once, sealed, and the run file says how it ended."""
    data = tmp_path / "data"
    with running(data, shm, flush_s) as process:
        process.kill()
        process.wait()
    said = process.stdout.read().split() if process.stdout and not process.stdout.closed else []
    (box,) = find_boxes()
    assert not box.alive
    code, text = command("recover", data)
    assert code == 0 and "of the black box of run" in text and "its last row is of step" in text, text
    steps = [row["step"] for row in launches.rows(data)]
    assert sorted(steps) == list(range(max(steps) + 1)) and max(steps) >= max(map(int, said), default=1000) - 1
    (path,) = (data / "runs").glob("*.json")
    run = json.loads(path.read_text())
    assert run["status"] == "failed" and run["rows"]["steps"] == len(steps)
    assert not find_boxes() and command("recover", data)[1].startswith("nothing to recover")


def test_a_clean_end_leaves_no_box(tmp_path: Path, shm: Path) -> None:
    with kv_canary.trace(tmp_path / "data", black_box=True, ring_rows=64) as session:
        (box,) = find_boxes()
        assert box.alive and box.run == session.run_id and box.description["dataset"] == str(tmp_path / "data")
        header = np.fromfile(next(box.path.glob("device-*.ring")), dtype=np.int64, count=HEADER_BYTES // 8)
        assert header[HeaderWord.MAGIC] == MAGIC and header[HeaderWord.PID] == os.getpid()
        session.record(step=1, **ROW)
    assert not find_boxes() and not list((shm / "kvcanary-trace").iterdir())
    assert [row["step"] for row in launches.rows(tmp_path / "data")] == [1]


def test_a_live_box_is_left_alone(tmp_path: Path, shm: Path) -> None:
    with running(tmp_path / "data", shm):
        (box,) = find_boxes()
        from kvcanary_trace.sinks.recover_box import recover_box

        with pytest.raises(DatasetError, match="still runs"):
            recover_box(box, tmp_path / "data")
        assert "left alone" in command("recover", tmp_path / "data")[1]
        assert "its process runs" in command("recover", "--list")[1]
        assert find_boxes()


def test_a_box_goes_where_it_is_sent(tmp_path: Path, shm: Path) -> None:
    """The dataset is gone: the box alone makes a whole one elsewhere."""
    with running(tmp_path / "data", shm, 600.0):
        pass
    (box,) = find_boxes()
    code, text = command("recover", tmp_path / "elsewhere", "--box", box.path)
    assert code == 0, text
    assert len(launches.rows(tmp_path / "elsewhere")) >= 1000
    assert list((tmp_path / "elsewhere" / "runs").glob("*.json"))
    assert isinstance(CliRunner().invoke(app, ["recover", str(tmp_path), "--box", "/nowhere"]).exception, DatasetError)


def test_a_ring_that_went_round_keeps_its_newest_rows(tmp_path: Path, shm: Path) -> None:
    """What was overwritten is counted; what stands is whole."""
    process = program(
        """
        import os, sys
        import kvcanary_trace as kv_canary
        with kv_canary.trace(sys.argv[1], black_box=True, ring_rows=100, flush_interval_s=600) as session:
            session._drain.stop()
            for number in range(250):
                session.record(step=number, mode="decode", bs=1)
            os.kill(os.getpid(), 9)
        """,
        tmp_path / "data",
        shm=shm,
    )
    process.communicate()
    (box,) = find_boxes()
    from kvcanary_trace.sinks.recover_box import recover_box

    (tmp_path / "data").mkdir(exist_ok=True)
    found = recover_box(box, tmp_path / "data")
    assert (found.rows, found.sealed, found.overwritten, found.last_step) == (100, 100, 150, 249)
    assert (found.last_mode, found.last_phase, found.writing) == ("decode", "plan", False)
    assert sorted(row["step"] for row in launches.rows(tmp_path / "data")) == list(range(150, 250))


def test_a_row_that_was_being_written_is_told(tmp_path: Path, shm: Path) -> None:
    """It is not taken, and the ending says so."""
    process = program(
        """
        import os, sys
        import kvcanary_trace as kv_canary
        with kv_canary.trace(sys.argv[1], black_box=True, ring_rows=64, flush_interval_s=600) as session:
            session.record(step=1, bs=1)
            session.record(step=2, bs=1)
            session.lane().device.words[2, 0] = -3  # the first store of the next row
            os.kill(os.getpid(), 9)
        """,
        tmp_path / "data",
        shm=shm,
    )
    process.communicate()
    code, text = command("recover", tmp_path / "data")
    assert code == 0 and "sealed 2 of 2 rows" in text and "died while it wrote the next row" in text


def test_a_devices_ring_recovers_too(tmp_path: Path, shm: Path) -> None:
    """Rows that a device's kernels published, here in Triton's interpreter; their mark ahead is no torn row."""
    pytest.importorskip("triton", reason="the device's probe is a Triton kernel")
    process = program(
        """
        import os, sys
        os.environ["TRITON_INTERPRET"] = "1"
        sys.path[:0] = sys.argv[2:]
        import kvcanary_trace as kv_canary
        from test_device_rows import Loop
        with kv_canary.trace(sys.argv[1], black_box=True, ring_rows=64, flush_interval_s=600) as session:
            session._observer.recorded_devices = frozenset({"cpu"})
            loop = Loop("cpu")
            loop.run(loop.launch)
            os.kill(os.getpid(), 9)
        """,
        tmp_path / "data",
        Path(__file__).parent,
        Path(__file__).parents[1],
        shm=shm,
    )
    process.communicate()
    code, text = command("recover", tmp_path / "data")
    assert code == 0 and "sealed 7 of 7 rows" in text and "wrote the next row" not in text, text
    assert [row["step"] for row in launches.rows(tmp_path / "data")] == [1000 + 7 * number for number in range(7)]
    assert all(row["verify_demand"] is not None for row in launches.rows(tmp_path / "data"))


def test_errors_keep_their_texts(tmp_path: Path, shm: Path) -> None:
    process = program(
        """
        import os, sys
        import kvcanary_trace as kv_canary
        with kv_canary.trace(sys.argv[1], black_box=True, ring_rows=64, flush_interval_s=600) as session:
            session.record(step=1, error_message="kv-canary: bs=9 exceeds write_req_capacity=8")
            os.kill(os.getpid(), 9)
        """,
        tmp_path / "data",
        shm=shm,
    )
    process.communicate()
    assert command("recover", tmp_path / "data")[0] == 0
    (row,) = launches.rows(tmp_path / "data")
    assert (row["error"], row["error_message"]) == (
        "bs-exceeds-write-req-capacity",
        "kv-canary: bs=9 exceeds write_req_capacity=8",
    )


def test_too_little_shared_memory_is_refused(tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is made, with the sizes and what to do."""
    monkeypatch.setattr(black_box.os, "statvfs", lambda _: SimpleNamespace(f_bavail=100, f_frsize=4096))
    with pytest.raises(SettingError, match=r"needs 32 MiB in .* 0 MiB are free.*shm-size.*at most ring_rows=768"):
        kv_canary.trace(tmp_path / "data", black_box=True).__enter__()
    assert not (tmp_path / "data").exists() and not (shm / "kvcanary-trace").exists()
    monkeypatch.undo()
    monkeypatch.setattr(black_box, "SHM", tmp_path / "missing")
    with pytest.raises(SettingError, match="cannot be used here"):
        kv_canary.trace(tmp_path / "data", black_box=True).__enter__()


def test_a_ring_that_does_not_fit_later_is_plain(
    tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A thread whose ring finds no room records all the same, outside the box; it is said."""
    with kv_canary.trace(tmp_path / "data", black_box=True, ring_rows=64) as session:

        def no_room(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(black_box.os, "posix_fallocate", no_room)
        thread = threading.Thread(target=lambda: session.record(step=5, **ROW))
        thread.start()
        thread.join()
    assert [row["step"] for row in launches.rows(tmp_path / "data")] == [5]
    assert "a crash would lose its rows: No space left on device" in caplog.text


def test_rings_of_ended_threads_go(tmp_path: Path, shm: Path) -> None:
    """Not at once: their rows may still be on their way to a sink."""
    with kv_canary.trace(tmp_path / "data", black_box=True, ring_rows=64, flush_interval_s=600) as session:
        thread = threading.Thread(target=lambda: session.record(step=5, **ROW))
        thread.start()
        thread.join()
        (box,) = find_boxes()
        session.flush()
        assert len(list(box.path.glob("*.ring"))) == 4
        for _ in range(12):
            session.flush()
        assert len(list(box.path.glob("*.ring"))) == 2


def test_a_sink_that_failed_to_the_end_keeps_the_box(tmp_path: Path, shm: Path) -> None:
    """The disk was full when the process ended: once there is room, recover has every row."""
    process = program(
        """
        import sys
        import kvcanary_trace as kv_canary
        from kvcanary_trace.sinks import live, parquet
        def full(*_, **__):
            raise OSError(28, "No space left on device")
        with kv_canary.trace(sys.argv[1], black_box=True, ring_rows=64, flush_interval_s=600) as session:
            live.TailFile.append = parquet.write_part = full
            for number in range(30):
                session.record(step=number, bs=1)
        """,
        tmp_path / "data",
        shm=shm,
    )
    process.communicate()
    assert process.returncode == 0
    assert launches.rows(tmp_path / "data") == []
    assert command("recover", tmp_path / "data")[0] == 0
    assert [row["step"] for row in launches.rows(tmp_path / "data")] == list(range(30))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_leaves_the_box_alone(tmp_path: Path, shm: Path) -> None:
    process = program(
        """
        import os, sys
        import kvcanary_trace as kv_canary
        with kv_canary.trace(sys.argv[1], black_box=True, ring_rows=64) as session:
            session.record(step=1)
            pid = os.fork()
            if pid == 0:
                session.close()
                session.black_box.remove()
                sys.exit(0)
            assert os.waitpid(pid, 0)[1] == 0
            assert session.black_box.path.is_dir() and len(list(session.black_box.path.glob("*.ring"))) == 2
            session.record(step=2)
        """,
        tmp_path / "data",
        shm=shm,
    )
    process.communicate()
    assert process.returncode == 0
    assert [row["step"] for row in launches.rows(tmp_path / "data")] == [1, 2]


# --- watch ------------------------------------------------------------------------------------------------------------


def test_a_live_process_is_watched(tmp_path: Path, shm: Path) -> None:
    """Its rows, from another process and without its doing; then it is killed, and that is said."""
    with running(tmp_path / "data", shm) as process:
        watcher = Watcher(pick_box(str(process.pid), find_boxes()))
        first = watcher.look()
        assert [(one.group, one.bs, one.verify_demand, one.verify_capacity) for one in first] == [("full", 3, 70, 60)]
        assert process.stdout is not None
        while not (seen := watcher.look()):  # lines come in bunches
            process.stdout.readline()
        (later,) = seen
        assert later.step > first[0].step and later.rows > 0 and later.peak_verify == 70
        code, text = command("watch", process.pid, "--once")
        assert code == 0 and "bs 3 of 8 (38%), verify 70 of 60 (117%)" in text
        code, text = command("watch", "--pid", process.pid, "--once", "--json")
        assert json.loads(text)["write_req_capacity"] == 8
        process.send_signal(signal.SIGKILL)
        process.wait()
        code, text = command("watch", process.pid, "--interval", "0.01")
        assert code == 1 and "recover takes what it left" in text


def test_watching_ends_with_the_session(tmp_path: Path, shm: Path) -> None:
    with kv_canary.trace(tmp_path / "data", black_box=True, ring_rows=64) as session:
        session.record(step=7, **ROW)
        watcher = Watcher(pick_box(None, find_boxes()))
        box = watcher.box
        assert [one.step for one in watcher.look()] == [7]
        assert watcher.look() == []
    assert not box.path.exists() and watcher.look() == []


def test_what_to_watch_must_be_clear(shm: Path) -> None:
    with pytest.raises(DatasetError, match=r"12 has no black box: .*live ones: none"):
        pick_box("12", [])
    with pytest.raises(DatasetError, match="name the process to watch"):
        pick_box(None, [])
    assert isinstance(CliRunner().invoke(app, ["watch", "--interval", "0"]).exception, SettingError)


def test_another_schema_is_refused(tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with kv_canary.trace(tmp_path / "data", black_box=True, ring_rows=64):
        (box,) = find_boxes()
        monkeypatch.setattr(black_box, "SCHEMA_VERSION", 99)
        with pytest.raises(DatasetError, match="recover it with the version that wrote it"):
            list(box.rings())

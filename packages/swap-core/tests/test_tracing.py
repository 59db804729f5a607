# SPDX-License-Identifier: Apache-2.0
"""Traces: exact on a virtual clock, and files that can be read again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swap_core import (
    Batch,
    Ledger,
    PackedPipeline,
    PerTensorPipeline,
    Pipeline,
    TraceLane,
    Tracer,
    TraceSpan,
    VirtualDevice,
    VirtualMemory,
    read_trace,
    write_trace,
)
from swap_core.cli import main

LOAD, COMPUTE, STORE = 9, 2, 3
COUNT = 4


class Rig:
    """Batches of one byte on a virtual device: 9 s to load, 2 s to update, 3 s to store."""

    def __init__(self, kind: str) -> None:
        self.virtual = VirtualDevice(1 / LOAD, 1 / STORE)
        ring = [VirtualMemory(1), VirtualMemory(1)]
        self.pipeline: Pipeline[Any, Any, Any, Any] = (
            PackedPipeline(self.virtual, Ledger(), [(arena, 1) for arena in ring])  # type: ignore[arg-type]
            if kind == "packed"
            else PerTensorPipeline(self.virtual, Ledger())  # type: ignore[arg-type]
        )
        events = ("restored", "loaded", "updated", "stored")
        self.batches = [
            Batch(
                index=index,
                nbytes=nbytes,
                memory=ring[index % 2] if kind == "packed" else VirtualMemory(1),
                transfers=(nbytes,),
                **{event: self.virtual.create_event() for event in events},
            )
            for index, nbytes in enumerate([1] * COUNT)
        ]

    def update(self, index: int) -> None:
        self.virtual.compute(COMPUTE)

    def run(self) -> None:
        self.pipeline.run(self.batches, self.update, lambda: self.virtual.compute(1))


def traced(kind: str, file: Path, updates: int = 1) -> list[TraceSpan]:
    rig = Rig(kind)
    tracer = Tracer(file)
    tracer.attach(rig.pipeline, rig.batches, "virtual:0")
    for _ in range(updates):
        tracer.begin_update()
        rig.run()
        tracer.end_update()
    tracer.finish()
    assert rig.pipeline.device is rig.virtual
    return list(read_trace(file))


def times(spans: list[TraceSpan], lane: TraceLane) -> dict[str, tuple[float, float]]:
    origin = min(span.start for span in spans if span.lane is TraceLane.LOAD)
    members = [span for span in spans if span.lane is lane]
    return {span.name: (span.start - origin, span.end - origin) for span in members}


@pytest.mark.parametrize("kind", ["packed", "per tensor"])
def test_spans_are_where_the_formula_says(kind: str, tmp_path: Path) -> None:
    spans = traced(kind, tmp_path / "trace.json")
    # Bound by loads, so they follow each other; each is updated and stored at once.
    expected = {
        TraceLane.LOAD: {f"load[{i}]": (i * LOAD, (i + 1) * LOAD) for i in range(COUNT)},
        TraceLane.UPDATE: {
            "update of states that stay": (0, 1),
            **{f"update[{i}]": ((i + 1) * LOAD, (i + 1) * LOAD + COMPUTE) for i in range(COUNT)},
        },
        TraceLane.STORE: {
            f"store[{i}]": ((i + 1) * LOAD + COMPUTE, (i + 1) * LOAD + COMPUTE + STORE)
            for i in range(COUNT)
        },
    }
    for lane, wanted in expected.items():
        found = times(spans, lane)
        assert list(found) == list(wanted)
        for name, pair in wanted.items():
            assert found[name] == pytest.approx(pair, abs=1e-3)
    waits = times(spans, TraceLane.WAIT)
    assert waits["wait for load[0]"] == pytest.approx((1, LOAD), abs=1e-3)
    assert waits["wait for store[3]"] == pytest.approx((38, 41), abs=1e-3)


def test_batches_bytes_and_updates_are_told(tmp_path: Path) -> None:
    spans = traced("packed", tmp_path / "trace.json", updates=2)
    copies = [span for span in spans if span.lane in (TraceLane.LOAD, TraceLane.STORE)]
    assert {span.nbytes for span in copies} == {1}
    assert [(s.update, s.batch) for s in spans if s.lane is TraceLane.STORE] == [
        (update, batch) for update in (1, 2) for batch in range(COUNT)
    ]
    host = [span for span in spans if span.lane is TraceLane.HOST]
    assert [s.update for s in host if s.name == "step"] == [1, 2]
    step = next(span for span in host if span.name == "step")
    inside = [s for s in host if s.update == 1 and s.name == "queue load[2]"]
    assert len(inside) == 1
    assert step.start <= inside[0].start <= inside[0].end <= step.end


def test_the_file_is_a_chrome_trace(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    traced("packed", file)
    content = json.loads(file.read_text())
    assert content["displayTimeUnit"] == "ms"
    assert content["otherData"]["updates"] == 1
    names = {e["args"]["name"] for e in content["traceEvents"] if e["ph"] == "M"}
    assert names == {"virtual:0", *(lane.value for lane in TraceLane)}
    assert all(event["dur"] >= 0 for event in content["traceEvents"] if event["ph"] == "X")


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    spans = [
        TraceSpan("cuda:1", TraceLane.LOAD, "load[7]", 1.5, 2.25, 7, 512, 3),
        TraceSpan("cuda:0", TraceLane.HOST, "restore", 2.0, 2.5),
    ]
    write_trace(tmp_path / "trace.json", spans, {})
    assert list(read_trace(tmp_path / "trace.json")) == spans


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("", IsADirectoryError, "is a folder"),
        ("missing/trace.json", FileNotFoundError, "does not exist; make it first"),
    ],
)
def test_bad_files_are_refused_at_once(
    name: str, error: type[OSError], words: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words):
        Tracer(tmp_path / name)


def test_a_file_is_made_before_anything_runs(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_text("older")
    Tracer(file)
    assert file.read_text() == ""


def test_the_command_tells_each_update_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, picture = tmp_path / "trace.json", tmp_path / "trace.png"
    traced("packed", file, updates=2)
    assert main(["trace", str(file), "--plot", str(picture)]) == 0
    told = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.split("|")] for line in told if "virtual" in line]
    total, load, update, store, wait = 41_000, 36_000, 9_000, 12_000, 32_000
    for number, row in enumerate(rows, start=1):
        assert row[:2] == ["virtual:0", str(number)]
        numbers = [total, load, update, store, wait]
        assert [float(cell) for cell in row[2:7]] == pytest.approx(numbers, abs=1)
        assert "4 B in" in row[7]
    assert len(rows) == 2
    assert picture.read_bytes().startswith(b"\x89PNG")

    assert main(["trace", str(file), "--update", "2"]) == 0
    assert sum("virtual" in line for line in capsys.readouterr().out.splitlines()) == 1


def test_the_command_refuses_what_is_no_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trace.json"
    file.write_text('{"traceEvents": [{"ph": "X"}]}')
    assert main(["trace", str(file)]) == 2
    assert "is no trace of optimizer.trace(FILE)" in capsys.readouterr().err
    write_trace(file, [], {})
    assert main(["trace", str(file), "--update", "4"]) == 2
    assert "holds nothing of update 4" in capsys.readouterr().err
    assert main(["trace", str(tmp_path / "other.json")]) == 2
    assert "other.json" in capsys.readouterr().err


# When updates begin and end.


def begun_early(rig: Rig) -> None:
    rig.pipeline.begin(rig.batches)


def updated_in_part(rig: Rig) -> None:
    rig.pipeline.begin(rig.batches)
    rig.pipeline.proceed(rig.update)


def updated_but_for_the_call(rig: Rig) -> None:
    rig.pipeline.begin(rig.batches)
    for _ in rig.batches:
        rig.pipeline.proceed(rig.update)


def given_up(rig: Rig) -> None:
    """What was loaded in vain was loaded for the update that follows."""
    rig.pipeline.begin(rig.batches)
    rig.pipeline.bring_home(rig.batches)


BEFORE = (begun_early, updated_in_part, updated_but_for_the_call, given_up)


@pytest.mark.parametrize("kind", ["packed", "per tensor"])
@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("earlier", [0, 1, 2])
def test_an_update_has_its_number_from_its_beginning_on(
    kind: str, before: Callable[[Rig], None], earlier: int, tmp_path: Path
) -> None:
    """Whatever was begun before the trace was."""
    rig = Rig(kind)
    for _ in range(earlier):
        before(rig)
        rig.run()
    tracer = Tracer(tmp_path / "trace.json")
    tracer.attach(rig.pipeline, rig.batches, "virtual:0")
    for _ in range(3):
        before(rig)
        with tracer.update():
            rig.run()
    before(rig)
    rig.pipeline.bring_home(rig.batches)
    tracer.finish()
    before(rig)
    rig.run()
    spans = read_trace(tmp_path / "trace.json")
    assert {span.update for span in spans} == {1, 2, 3, 4}
    for number in (1, 2, 3):
        members = [span for span in spans if span.update == number]
        for lane, name in ((TraceLane.UPDATE, "update"), (TraceLane.STORE, "store")):
            found = sorted(span.name for span in members if span.lane is lane and "[" in span.name)
            assert found == [f"{name}[{index}]" for index in range(COUNT)]
        assert "wait for load[0]" in {span.name for span in members}
        assert sum(span.name == "step" for span in members) == 1
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"]["updates"] == 4


def test_after_an_update_that_fails_the_next_one_has_a_number_of_its_own(tmp_path: Path) -> None:
    rig = Rig("packed")
    tracer = Tracer(tmp_path / "trace.json")
    tracer.attach(rig.pipeline, rig.batches, "virtual:0")
    with pytest.raises(ZeroDivisionError), tracer.update():
        rig.pipeline.run(rig.batches, lambda index: 1 // (1 - index), lambda: None)  # type: ignore[arg-type]
    begun_early(rig)
    with tracer.update():
        rig.run()
    tracer.finish()
    spans = [span for span in read_trace(tmp_path / "trace.json") if span.lane is TraceLane.UPDATE]
    assert [(s.update, s.batch) for s in spans if s.batch is not None] == [
        (1, 0),
        *((2, batch) for batch in range(COUNT)),
    ]


def test_what_comes_home_is_no_update(tmp_path: Path) -> None:
    rig = Rig("packed")
    tracer = Tracer(tmp_path / "trace.json")
    tracer.attach(rig.pipeline, rig.batches, "virtual:0")
    with tracer.update():
        rig.pipeline.run(rig.batches, rig.update, lambda: None, keep_last=True)
    rig.virtual.compute(1000)
    rig.pipeline.bring_home(rig.batches)
    tracer.finish()
    spans = read_trace(tmp_path / "trace.json")
    assert max(span.seconds for span in spans if span.lane is TraceLane.UPDATE) < 1000
    (stored,) = (s for s in spans if s.name == f"store[{COUNT - 1}]" and s.lane is TraceLane.STORE)
    assert stored.update == 0


# Files of traces that cannot be written.


def test_every_event_has_happened_before_it_is_asked_for_its_time(tmp_path: Path) -> None:
    """Whatever stream it was recorded on: the one that was current then is none at the end."""
    rig, file = Rig("packed"), tmp_path / "trace.json"
    tracer = Tracer(file)
    happened: list[Any] = []
    synchronize, elapsed = rig.virtual.synchronize, rig.virtual.elapsed

    def synchronize_and_note(event: Any) -> None:
        happened.append(event)
        synchronize(event)

    def elapsed_if_happened(start: Any, end: Any) -> float:
        assert any(event is start for event in happened)
        assert any(event is end for event in happened)
        return elapsed(start, end)

    rig.virtual.synchronize = synchronize_and_note  # type: ignore[method-assign]
    rig.virtual.elapsed = elapsed_if_happened  # type: ignore[method-assign]
    tracer.attach(rig.pipeline, rig.batches, "virtual:0")
    with tracer.update():
        rig.run()
    tracer.finish()
    assert read_trace(file)


@pytest.mark.parametrize("fails", ["device", "file"])
def test_no_file_is_left_that_is_not_whole(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, file = Rig("packed"), tmp_path / "trace.json"
    tracer = Tracer(file)
    tracer.attach(rig.pipeline, rig.batches, "virtual:0")
    with tracer.update():
        rig.run()

    def broken(*_: object) -> None:
        raise OSError("planted")

    def half_written(path: Path, text: str) -> int:
        with path.open("w") as stream:
            stream.write(text[: len(text) // 2])
        raise OSError("planted")

    if fails == "device":
        rig.virtual.synchronize = broken  # type: ignore[method-assign]
    else:
        monkeypatch.setattr(Path, "write_text", half_written)
    with pytest.raises(OSError, match="planted"):
        tracer.finish()
    assert not file.exists()
    assert rig.pipeline.device is rig.virtual

from __future__ import annotations

import json
from pathlib import Path

import pytest

from transfuse.errors import ConfigError
from transfuse.server.batch.files import BatchFiles


def files(folder: Path, *, resume: bool = False, max_line_bytes: int = 1000) -> BatchFiles:
    return BatchFiles(folder / "in", folder / "out", resume=resume, max_line_bytes=max_line_bytes)


def named(*names: str) -> bytes:
    return b"".join(json.dumps({"custom_id": name}).encode() + b"\n" for name in names)


def test_lines_come_with_their_numbers_and_ends(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"one\n\n  \r\n two \r\nthree")
    with files(tmp_path) as opened:
        found = [(line.number, line.data, line.end) for line in opened]
        assert opened.num_bytes == 21
    assert found == [(1, b"one", 4), (4, b"two", 16), (5, b"three", 21)]


def test_a_line_that_is_too_long_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"x" * 3_000_000 + b"\n" + b"y" * 999 + b"\n" + b"z" * 1001)
    with files(tmp_path) as opened:
        found = [(line.number, line.data and len(line.data), line.end) for line in opened]
    assert found == [(1, None, 3_000_001), (2, 999, 3_001_001), (3, None, 3_002_002)]


def test_an_output_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(named("a"))
    (tmp_path / "out").write_bytes(b"precious")
    with pytest.raises(ConfigError, match="--resume"):
        files(tmp_path)
    assert (tmp_path / "out").read_bytes() == b"precious"


def test_an_empty_output_is_none(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(named("a"))
    (tmp_path / "out").touch()
    with files(tmp_path) as opened:
        opened.write(b"answer\n")
        assert (tmp_path / "out").read_bytes() == b"answer\n", "it is there at once"


@pytest.mark.parametrize("tail", [b"", b'{"custom_id": "b", "resp'])
def test_an_output_is_gone_on_with(tmp_path: Path, tail: bytes) -> None:
    (tmp_path / "in").write_bytes(b"\n" + named("a") + b"no JSON\n" + named("b", "c"))
    (tmp_path / "out").write_bytes(named("a") + b'{"custom_id": null}\n' + tail)
    with files(tmp_path, resume=True) as opened:
        assert opened.num_done == 2
        assert [line.data for line in opened] == [b'{"custom_id": "b"}', b'{"custom_id": "c"}']
        opened.write(b"next\n")
    assert (tmp_path / "out").read_bytes() == named("a") + b'{"custom_id": null}\nnext\n'


def test_without_an_output_resuming_starts(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(named("a"))
    with files(tmp_path, resume=True) as opened:
        assert (opened.num_done, len(list(opened))) == (0, 1)


@pytest.mark.parametrize("done", [named("b"), named("a", "b"), named("a", "a")])
def test_the_output_of_another_input_is_not_gone_on_with(tmp_path: Path, done: bytes) -> None:
    (tmp_path / "in").write_bytes(named("a"))
    (tmp_path / "out").write_bytes(done)
    with pytest.raises(ConfigError, match="answers no line of this input"):
        files(tmp_path, resume=True)
    assert (tmp_path / "out").read_bytes() == done


def test_files_that_cannot_be_opened_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="in cannot be opened: No such file"):
        files(tmp_path)
    (tmp_path / "in").touch()
    with pytest.raises(ConfigError, match="nowhere/out cannot be opened"):
        BatchFiles(tmp_path / "in", tmp_path / "nowhere" / "out", resume=False, max_line_bytes=9)


def test_a_full_disk_is_named() -> None:
    with (
        BatchFiles(Path("/dev/null"), Path("/dev/full"), resume=False, max_line_bytes=9) as opened,
        pytest.raises(ConfigError, match="No space left"),
    ):
        opened.write(b"x\n")

"""The two files of a batch: one is read line by line, the other written so, and gone on with after an interruption."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Self

from transfuse.errors import ConfigError
from transfuse.server.batch.lines import custom_id_of

_SKIPPED_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class InputLine:
    """A line that holds something.

    Attributes:
        number: in the file, from 1 on.
        data: without the line break; None where it is longer than may be.
        end: bytes of the file up to its end.
    """

    number: int
    data: bytes | None
    end: int


class BatchFiles:
    """The files, open within a `with` block.

    Attributes:
        num_done: lines that the output answered already.
        num_bytes: of the input; 0 where it is no regular file.

    Args:
        input_path: requests, one a line.
        output_path: where answers go.
        resume: whether the output of an interrupted run is gone on with.
        max_line_bytes: longer lines are not read.

    Raises:
        ConfigError: a file cannot be opened, the output exists, or it is not that of this input.
    """

    def __init__(self, input_path: Path, output_path: Path, *, resume: bool, max_line_bytes: int) -> None:
        self.num_done = 0
        self._max_line_bytes = max_line_bytes
        self._output_path = output_path
        is_there = output_path.is_file()
        if not resume and is_there and output_path.stat().st_size:
            raise ConfigError(f"{output_path} exists. Pass --resume to go on with it, or choose another file.")
        with ExitStack() as stack:
            self._input = stack.enter_context(_open(input_path, "rb"))
            self.num_bytes = input_path.stat().st_size if input_path.is_file() else 0
            # Opened without being emptied, since it may be gone on with.
            self._output = stack.enter_context(_open(output_path, "r+b" if is_there else "wb"))
            self._lines = self._read()
            if resume and is_there:
                self._skip_done()
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        """The files."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close them."""
        with suppress(OSError):  # what could not be written was told, and would be tried again here
            self._stack.close()

    def __iter__(self) -> Iterator[InputLine]:
        """The lines that are still to be answered."""
        return self._lines

    def write(self, line: bytes) -> None:
        """Append a line, which is on its way to the disk when this returns.

        Args:
            line: with its line break.

        Raises:
            ConfigError: the disk is full, or whoever read it is gone.
        """
        try:
            self._output.write(line)
            self._output.flush()
        except OSError as error:
            raise ConfigError(f"{self._output_path} cannot be written: {error}. Go on with --resume.") from error

    def _read(self) -> Iterator[InputLine]:
        number = end = 0
        while line := self._input.readline(self._max_line_bytes + 1):
            number, end = number + 1, end + len(line)
            data: bytes | None = line.strip()
            if len(line) > self._max_line_bytes:
                data = None
                while line and not line.endswith(b"\n"):
                    line = self._input.readline(_SKIPPED_BYTES)
                    end += len(line)
            if data != b"":
                yield InputLine(number, data, end)

    def _skip_done(self) -> None:
        """Pass over what the output answers; a line that was cut off is dropped from it."""
        end = 0
        for answer in self._output:
            if not answer.endswith(b"\n"):
                break
            line = next(self._lines, None)
            asked = None if line is None or line.data is None else custom_id_of(line.data)
            if line is None or custom_id_of(answer) != asked:
                raise ConfigError(
                    f"Line {self.num_done + 1} of {self._output_path} answers no line of this input at its place. Give "
                    "the input that it was made from, or choose another file."
                )
            self.num_done, end = self.num_done + 1, end + len(answer)
        self._output.seek(end)
        self._output.truncate()


def _open(path: Path, mode: str) -> BinaryIO:
    try:
        return path.open(mode)  # type: ignore[return-value]
    except OSError as error:
        raise ConfigError(f"{path} cannot be opened: {error.strerror}. Check the path.") from error

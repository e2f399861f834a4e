from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit.inspect.models import Stack
from transfuse.errors import ConfigError, ModelNotFoundError, UnsupportedModelError
from transfuse.inspect.python_class import is_python_class, load_class_subject, read_input

HERE = Stack.__module__


@pytest.mark.parametrize("name", ["package.module:Class", "module:Class", "file.py:Class", "../some dir/file.py:Class"])
def test_classes_are_told_from_models(name: str) -> None:
    assert is_python_class(name)


@pytest.mark.parametrize("name", ["owner/name", "folder", "./folder", "model.gguf", "config.json", "C:/folder/x"])
def test_models_are_no_classes(name: str) -> None:
    assert not is_python_class(name)


def test_token_ids_are_tried_where_there_is_an_embedding() -> None:
    subject = load_class_subject(f"{HERE}:Stack")
    assert subject.facts["input"] == "[1, 7] int64"
    assert subject.record().trace.error is None
    assert next(subject.module.parameters()).is_meta


def test_hidden_states_are_as_wide_as_the_first_parameter() -> None:
    assert load_class_subject(f"{HERE}:Mlp").facts["input"] == "[1, 7, 16] float32"


def test_what_was_tried_before_is_told(tmp_path: Path) -> None:
    file = tmp_path / "odd.py"
    file.write_text(
        "import torch\n"
        "class Odd(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.table = torch.nn.Embedding(8, 4)\n"
        "        self.fc = torch.nn.Linear(4, 4)\n"
        "    def forward(self, x):\n"
        "        return self.fc(x * 1.0)\n"
    )
    facts = load_class_subject(f"{file}:Odd").facts
    assert facts["input"] == "[1, 7, 4] float32"
    assert facts["tried before"].startswith("[1, 7] int64 (RuntimeError")


def test_arguments_and_inputs_can_be_given() -> None:
    subject = load_class_subject(
        f"{HERE}:Mlp",
        '{"size": 24, "inner": 8}',
        [
            "2,5,24:float16",
        ],
    )
    assert subject.facts["input"] == "[2, 5, 24] float16"
    assert load_class_subject(f"{HERE}:Mlp", "[24]").module.up.in_features == 24


def test_inputs_are_read() -> None:
    assert read_input("1,7").shape == (1, 7)
    assert read_input("[1x7]:int64").dtype is torch.int64
    for wrong in ("", "a,b", "1,7:integer", "1,-7", "1,7:nn"):
        with pytest.raises(ConfigError, match="SHAPE"):
            read_input(wrong)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("nowhere.py:Decoder", ModelNotFoundError, "no file nowhere.py"),
        ("nowhere.at.all:Decoder", ModelNotFoundError, "no Python module nowhere.at.all"),
        (f"{HERE}:Nothing", ModelNotFoundError, "Its modules are: .*Stack"),
        (f"{HERE}:report_of", ConfigError, "no class of torch.nn.Module"),
        ("torch.nn:Linear", UnsupportedModelError, "--init"),
    ],
)
def test_errors_say_what_to_do(name: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        load_class_subject(name)


def test_a_file_may_import_its_neighbours_and_be_called_like_a_module(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_json.py").write_text("SIZE = 4\n")
    (tmp_path / "json.py").write_text(
        "import torch\nfrom neighbour_of_json import SIZE\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.fc = torch.nn.Linear(SIZE, SIZE)\n"
        "    def forward(self, x):\n"
        "        return self.fc(x)\n"
    )
    import json
    import sys

    assert load_class_subject(f"{tmp_path / 'json.py'}:Net").record().trace.error is None
    assert sys.modules["json"] is json


def test_code_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("import nothing_of_this_name\n")
    with pytest.raises(UnsupportedModelError, match=r"broken.py cannot be imported: ModuleNotFoundError"):
        load_class_subject(f"{file}:Net")

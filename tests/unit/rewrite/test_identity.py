"""Putting an expression in its own place changes nothing, in the forwards of real models."""

from __future__ import annotations

import ast
import inspect
import random

import pytest
import torch
from torch import nn

from tests.zoo import build
from transfuse.rewrite.compiled import compile_method
from transfuse.rewrite.edit import Edits
from transfuse.rewrite.source import MethodSource, RewriteRefused, method_source, position_of
from transfuse.trace.graph import Position

# Together some 40 classes.
TYPES = ["llama", "gpt2", "gemma3n_text", "falcon", "bloom", "qwen3_moe", "phi", "gpt_neox"]
_WHOLE = 8


def classes_of(model: nn.Module) -> list[type[nn.Module]]:
    found = {type(module) for module in model.modules() if type(module).__module__.startswith("transformers.")}
    return sorted(found, key=lambda cls: cls.__qualname__)


def positions(source: MethodSource, edits: Edits) -> list[Position]:
    """Of all expressions that can be replaced."""
    found: list[Position] = []
    for node in ast.walk(source.tree):
        position = position_of(node)
        is_read = isinstance(getattr(node, "ctx", ast.Load()), ast.Load)
        if position is None or not is_read or isinstance(node, ast.Starred | ast.JoinedStr | ast.FormattedValue):
            continue
        try:
            edits.replace(position, "ITSELF", ITSELF=node)
        except RewriteRefused:
            continue
        found.append(position)
    return found


def with_identities(source: MethodSource, every: list[Position], chosen: random.Random) -> ast.FunctionDef:
    edits = Edits(source)
    for position in chosen.sample(every, min(len(every), _WHOLE)):
        edits.replace(position, "ITSELF", ITSELF=edits.expression(position))
    return edits.apply()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", TYPES)
def test_identity(name: str) -> None:
    chosen = random.Random(name)
    model = build(name)
    ids = torch.arange(5, 14).unsqueeze(0)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    rewritten = 0
    for cls in classes_of(model):
        try:
            source = method_source(cls.forward)
            compile_method(source, source.tree)
        except RewriteRefused:
            continue
        every = positions(source, Edits(source))
        for _ in range(2):
            tree = with_identities(source, every, chosen)
            tree.decorator_list, plain = [], ast.parse(ast.unparse(source.tree)).body[0]
            assert isinstance(plain, ast.FunctionDef)
            plain.decorator_list = []
            assert ast.dump(ast.parse(ast.unparse(tree))) == ast.dump(ast.Module([plain], []))
        method = compile_method(source, tree)
        assert inspect.signature(method.function) == inspect.signature(cls.forward)
        derived = type(cls.__name__, (cls,), {"forward": method.function})
        for module in model.modules():
            if type(module) is cls:
                module.__class__ = derived
        rewritten += 1
    assert rewritten >= 3
    with torch.no_grad():
        assert torch.equal(model(ids, use_cache=False).logits, expected)

from __future__ import annotations

from pathlib import Path

from tests.unit.inspect.models import llama_config, report_of
from transfuse.inspect.diff import class_diffs, diff_lines

ORIGINAL = '''
    @decorated
    def forward(self, x):
        """A docstring."""
        # a comment
        y = self.first( x )
        z = self.second(
            y,
        )
        return z
'''


def test_only_real_changes_show() -> None:
    same = "def forward(self, x):\n    y = self.first(x)\n    z = self.second(y)\n    return z\n"
    assert [line.kind for line in diff_lines(ORIGINAL, same)] == ["@"]
    changed = same.replace("self.second(y)", "torch.ops.transfuse.linear(y, self.second.weight, None)")
    lines = [(line.kind, line.text) for line in diff_lines(ORIGINAL, changed, num_context=1)]
    assert lines == [
        ("@", "1 more line"),
        (" ", "    y = self.first(x)"),
        ("-", "    z = self.second(y)"),
        ("+", "    z = torch.ops.transfuse.linear(y, self.second.weight, None)"),
        (" ", "    return z"),
    ]


def test_each_rewritten_class_is_shown_once(tmp_path: Path) -> None:
    plan = report_of(llama_config(), tmp_path).plan
    diffs = {diff.module_class: diff for diff in class_diffs(plan)}
    assert len(diffs) == len(class_diffs(plan))
    assert diffs["LlamaAttention"].num_modules == 3
    assert diffs["LlamaAttention"].place.startswith(str(Path(diffs["LlamaAttention"].place).parent))
    assert "modeling_llama.py:" in diffs["LlamaAttention"].place
    added = [line.text for line in diffs["LlamaAttention"].lines if line.kind == "+"]
    assert any("torch.ops.transfuse.rotary" in line for line in added)
    assert "Linear" not in diffs
    assert [diff.module_class for diff in class_diffs(plan, "LlamaMLP")] == ["LlamaMLP"]

from __future__ import annotations

import asyncio
import json

from tests.unit.server.asgi import call
from tests.unit.server.openai.fake_llm import FakeLLM
from transfuse.fusion.plan import Fusion, FusionPlan, Kept, KindPlan
from transfuse.server.app import create_app
from transfuse.server.settings import ServerSettings

LAYERS = tuple(f"model.layers.{index}.attn" for index in (0, 1, 10))
PLAN = FusionPlan(
    "TinyForCausalLM",
    (
        KindPlan(
            "Attention",
            "/home/somebody/tiny.py",
            7,
            LAYERS,
            "partial",
            (Fusion("qkv", ("q", "k", "v"), ("linear",)),),
            (Kept("rotary", "it is scaled by hand", 12),),
            num_linears=4,
        ),
        KindPlan("Norm", "tiny.py", 30, ("model.norm",), "fused", (Fusion("norm", (), ("rms_norm",)),)),
        KindPlan("Embedding", "tiny.py", 40, ("model.embed",), "kept"),
    ),
    layers="model.layers",
)


def read(llm: FakeLLM) -> dict[str, object]:
    app = create_app(llm, ServerSettings(served_model_names=("m",)))  # type: ignore[arg-type]
    reply = asyncio.run(call(app, "GET", "/fusion"))
    assert reply.status == 200 and reply.header("content-type") == "application/json"
    return dict(json.loads(reply.body))


def test_each_layer_has_a_cell_for_each_pattern() -> None:
    llm = FakeLLM()
    llm.fusion_plan = PLAN
    found = read(llm)
    assert found["patterns"] == ["qkv", "rotary"]
    layers = found["layers"]
    assert isinstance(layers, list)
    assert [layer["name"] for layer in layers] == ["model.layers.0", "model.layers.1", "model.layers.10"]
    assert layers[2]["cells"] == [
        {"status": "fused", "notes": ["model.layers.10.attn: qkv: q, k, v → linear"]},
        {"status": "refused", "notes": ["model.layers.10.attn: it is scaled by hand (tiny.py:12)"]},
    ]


def test_kinds_say_what_was_done_and_no_paths_of_the_machine() -> None:
    llm = FakeLLM()
    llm.fusion_plan = PLAN
    found = read(llm)
    assert (found["model_class"], found["num_linears"], found["num_fused_linears"]) == ("TinyForCausalLM", 12, 9)
    assert found["kinds"] == [
        {
            "module_class": "Attention",
            "count": 3,
            "status": "partial",
            "fused": ["qkv: q, k, v → linear"],
            "left": ["rotary: it is scaled by hand (tiny.py:12)"],
        },
        {"module_class": "Norm", "count": 1, "status": "fused", "fused": ["norm → rms_norm"], "left": []},
    ]
    assert "/home" not in json.dumps(found)


def test_without_a_plan_the_implementation_is_told_alone() -> None:
    found = read(FakeLLM())
    assert (found["implementation"], found["implementation_reason"]) == ("plain", "because")
    assert found["model_class"] is None and found["layers"] == found["kinds"] == found["patterns"] == []

"""All patterns, in the order in which they are looked for."""

from __future__ import annotations

from transfuse.fusion.attention import AttentionFuser
from transfuse.fusion.dense_experts import DenseExpertsFuser
from transfuse.fusion.fuser import Fuser
from transfuse.fusion.gated_norm import GatedNormFuser
from transfuse.fusion.glu import GluFuser
from transfuse.fusion.inline_rotary import InlineRotaryFuser
from transfuse.fusion.mla import LatentAttentionFuser
from transfuse.fusion.mlp import ActivatedLinearFuser, LinearFunctionFuser, LinearFuser
from transfuse.fusion.module_list_experts import ModuleListExpertsFuser
from transfuse.fusion.norm import NormFuser
from transfuse.fusion.packed_qkv import PackedQkvFuser
from transfuse.fusion.qkv import SharedInputFuser
from transfuse.fusion.residual_norm import ResidualNormFuser
from transfuse.fusion.rotary import RotaryFuser
from transfuse.fusion.router import RouterFuser

# In this order: where two want the same nodes, the first has them.
FUSERS: tuple[Fuser, ...] = (
    NormFuser(),
    GatedNormFuser(),
    ResidualNormFuser(),
    RotaryFuser(),
    InlineRotaryFuser(),
    RouterFuser(),
    DenseExpertsFuser(),
    ModuleListExpertsFuser(),
    GluFuser(),
    LatentAttentionFuser(),
    SharedInputFuser(),
    ActivatedLinearFuser(),
    PackedQkvFuser(),
    LinearFuser(),
    LinearFunctionFuser(),
    AttentionFuser(),
)

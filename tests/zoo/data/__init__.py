"""What a tiny config of each model type sets, by family; everything that differs by type is here."""

from __future__ import annotations

from tests.zoo.data import composite, dense, gemma, latent, moe, recurrent
from tests.zoo.data.sizes import Overrides

FAMILIES = (dense, gemma, moe, latent, recurrent, composite)

# Fields by model type, laid over the small sizes.
OVERRIDES: dict[str, Overrides] = {name: over for family in FAMILIES for name, over in family.OVERRIDES.items()}

# Other faces of an architecture, laid over its OVERRIDES: tiny_config("falcon:alibi").
VARIANTS: dict[str, dict[str, Overrides]] = dict(
    sorted((model_type, named) for family in FAMILIES for model_type, named in family.VARIANTS.items())
)

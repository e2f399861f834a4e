"""Shows what was found in a model, what was fused and why the rest was not: as a tree, diffs, JSON or a page."""

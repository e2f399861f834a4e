"""One forward of a model on `meta`, recorded as one `torch.fx` graph for each kind of module in it."""

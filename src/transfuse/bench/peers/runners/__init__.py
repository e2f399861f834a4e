"""One engine each: loads it, and answers the protocol. Run by the Python of the engine, often another than ours."""

"""One runner per engine: loads the model, then answers workloads over the protocol."""

"""Other engines, and our own, on equal workloads: each a process that answers over one protocol."""

"""Benchmarks: Transfuse beside its peers."""

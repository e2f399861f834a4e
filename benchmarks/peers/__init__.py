"""Transfuse and other engines on equal workloads, interleaved in one run."""

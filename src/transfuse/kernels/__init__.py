"""Ops over the paged cache, registered with torch under `transfuse::`."""

"""Installs other engines and makes test models for `transfuse bench compare`; measures what the machine allows."""

"""No fault loses or mixes a request: a real server, broken on purpose. Short in CI, long with `--long`."""

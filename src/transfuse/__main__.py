"""`python -m transfuse`."""

from transfuse.cli import main

main()

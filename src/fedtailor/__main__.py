"""`python -m fedtailor`."""

from .cli import main

main()

"""`python -m benchmarks.table`."""

from benchmarks.table.command import main

main()

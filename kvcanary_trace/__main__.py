"""`python -m kvcanary_trace` is the `kvcanary-trace` command."""

from kvcanary_trace.cli import main

main()

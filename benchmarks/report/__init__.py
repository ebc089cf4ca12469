"""Tables and pictures of results: tables on the terminal, both on one HTML page (`python -m benchmarks.report`)."""

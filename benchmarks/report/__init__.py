"""One page and its pictures from the result files of the other benchmarks: `python -m benchmarks.report`."""

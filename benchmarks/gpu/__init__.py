"""The parts of `benchmarks.gpu_check`: kernels, whole models, parts of a step."""

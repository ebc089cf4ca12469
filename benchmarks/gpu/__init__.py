"""What `benchmarks.gpu_check` measures on a GPU: kernels, whole models, parts of a step."""

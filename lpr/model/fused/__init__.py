"""Parts of transformers' models that are known by their source, computed by a few calls: in C++ or by Triton kernels.

`accelerate` replaces what it knows, from whole decoder layers down to single norms. All else stays as transformers has
it, and the self-check compares the result with the modules' own forwards.
"""

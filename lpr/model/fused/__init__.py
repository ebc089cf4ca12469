"""Fused forms of transformers' modules, in C++ or as Triton kernels, from whole decoder layers to single norms.

Modules are recognised by their behaviour (`probe`). Others keep transformers' forward, and the self-check compares the
result with the modules' own forwards.
"""

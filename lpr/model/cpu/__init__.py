"""A transformers model on a CPU: packed weights for its matrix products, C++ for what lies between them.

`accelerate` replaces what it knows, module by module. All else stays as transformers has it.
"""

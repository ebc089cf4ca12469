"""How many meshes a service needs, predicted: the engine's own scheduler on a clock of step times, without a model."""

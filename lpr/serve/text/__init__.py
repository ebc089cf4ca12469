"""Text in the front: tokens, templates, holes, grammars and log-probabilities, without a model."""

"""What a step costs before it is run: memory, traffic and, as a prediction, time."""

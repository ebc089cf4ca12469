"""The engine: API, commands, replica and the decoding step."""

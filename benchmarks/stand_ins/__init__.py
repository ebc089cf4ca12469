"""Stand-ins for a model or a device, for counts that need ranks and steps but no weights."""

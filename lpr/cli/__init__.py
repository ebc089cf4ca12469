"""The commands: arguments, JSON Lines and output for people."""

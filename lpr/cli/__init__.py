"""The commands: arguments, JSON Lines, what a person sees."""

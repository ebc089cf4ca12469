"""The completion service: a front process that speaks HTTP, and the ranks behind it."""

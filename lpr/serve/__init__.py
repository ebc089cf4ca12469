"""The completion service: an HTTP front process, and the ranks."""

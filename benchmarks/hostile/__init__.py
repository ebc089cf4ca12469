"""Clients that do harm to a service, and what a neighbour sees of it."""

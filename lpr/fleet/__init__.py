"""Drafts shared between the replicas of a fleet, and prefix-affinity routing."""

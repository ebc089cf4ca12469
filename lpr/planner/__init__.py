"""Memory, traffic and predicted time of steps, without running them."""

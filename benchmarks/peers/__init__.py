"""lpr and its peers: a script per peer completes prompts in an environment of the peer's own."""

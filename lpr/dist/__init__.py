"""The world: which ranks there are and how a step's results reach all of them."""

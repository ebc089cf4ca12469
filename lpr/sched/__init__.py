"""Which requests run, on which ranks, in which pages: pure functions of what all ranks know."""

"""Text processing in the front: tokens, chat templates, fill-in-the-middle, grammars and tool calls."""

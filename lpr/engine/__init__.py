"""The engine: requests in, exact completions out; commands, scheduler, step."""

"""lpr's server beside vLLM's and llama.cpp's: the same model, machine, prompts and run."""

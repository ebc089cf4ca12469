"""LoRA adapters in PEFT's format, applied per row of a step."""

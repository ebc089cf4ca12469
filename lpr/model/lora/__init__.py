"""LoRA adapters: read from PEFT's folders, and added to the products of the rows that ask for them."""

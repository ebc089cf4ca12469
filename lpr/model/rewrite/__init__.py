"""All changes that lpr makes to a transformers model."""

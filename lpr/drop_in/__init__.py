"""The drop-in for transformers programs: `custom_generate=lpr.lookahead`."""

"""Programs that measure lpr; each prints one JSON line last."""

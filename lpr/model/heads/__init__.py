"""Multi-token-prediction heads: a checkpoint's extra layer, which guesses tokens beyond the next one."""

"""Recurrent layers over token trees: convolutions and scans; states advance along the accepted path only."""

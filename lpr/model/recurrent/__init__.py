"""Recurrent layers that evaluate token trees: convolutions and scans whose state follows the accepted path only."""

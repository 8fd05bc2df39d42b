"""`fastdiff tune`: find the fastest tiles, warps and stages on this card, and keep them in a table."""

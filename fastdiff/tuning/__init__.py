"""`fastdiff tune`: the tiles, warps and stages that are fastest on the card at hand, as a table."""

"""Draw with a model of the user to tune it. This folder stands above the pipelines, and `tuning` below them."""

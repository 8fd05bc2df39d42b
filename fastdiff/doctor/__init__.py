"""`fastdiff doctor`: what this machine has, what runs on it, and what is wrong. Nothing is drawn, no model is read."""

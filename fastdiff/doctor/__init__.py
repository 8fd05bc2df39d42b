"""`fastdiff doctor`: what this machine has, what runs on it, and what is wrong. Draws nothing, and reads no model."""

"""Compile beforehand what drawing launches: `fastdiff warm`."""

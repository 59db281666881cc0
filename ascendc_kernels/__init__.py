"""Operators in Ascend C, for CPUs through `host_model` and for NPUs. Legend of a folder: see README.md."""

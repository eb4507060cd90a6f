"""Losses of outputs that are split in any way: each worker gets its part, and the parts add up."""

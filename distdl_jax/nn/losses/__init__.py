"""Losses of outputs that are split in any way: each worker gets a part, and the parts add up to the loss."""

"""Functions of numpy and PyTorch along dimensions that are split: each worker passes and gets its block."""

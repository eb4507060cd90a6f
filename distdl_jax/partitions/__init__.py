"""Partitions, specs of tensors, initial values, worlds for planning, files of arrays."""

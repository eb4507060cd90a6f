"""The parts common to all layers: the contract, partitioned parameters, output specs, and products of blocks."""

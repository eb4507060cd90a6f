"""What every layer is made of: its contract, parameters on partitions, specs of outputs, products of blocks."""

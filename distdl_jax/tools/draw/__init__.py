"""Pictures as SVG and as text: of partitions, tensors, layers and messages; imported when they are asked for."""

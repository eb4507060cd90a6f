"""Pictures as SVG and as text, of partitions, tensors, layers and messages; imported on demand."""

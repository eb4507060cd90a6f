"""The choice of fast partitions: by counting, measuring a short list, and building the network with the fastest."""

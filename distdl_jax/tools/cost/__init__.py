"""What a training step costs: counted from the programs that the layers trace."""

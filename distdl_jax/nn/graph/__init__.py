"""Graph layers: messages along edges."""

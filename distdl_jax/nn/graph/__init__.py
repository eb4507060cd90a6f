"""Layers of graphs: messages along edges."""

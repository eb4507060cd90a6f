"""Recurrent layers: cells, which go one step, and layers over a sequence; carries are split like outputs."""

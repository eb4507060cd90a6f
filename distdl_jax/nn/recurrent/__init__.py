"""Recurrent layers: cells, which advance by one step, and layers over a sequence; carries are split like outputs."""

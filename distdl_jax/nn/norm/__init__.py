"""Normalisations: of a split tensor, along dimensions that may be split too."""

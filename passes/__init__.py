"""Passes: fx graph in, fx graph out."""

"""The integer program. Imports no torch."""

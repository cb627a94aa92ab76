"""What ops, collectives and transfers cost."""

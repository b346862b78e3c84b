"""What things are: frozen dataclasses that check themselves. NumPy and the standard library only."""

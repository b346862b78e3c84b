"""How values change: pure functions, arrays in, arrays out. No file, clock, network or scheduler."""

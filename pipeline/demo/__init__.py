"""Small synthetic recordings in the exact layout of the formats, painted from their own numbers."""

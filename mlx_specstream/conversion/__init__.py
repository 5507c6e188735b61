"""Other formats into the folders that mlx-lm and this package load."""

"""Training streams on the user's own machine: corpus, trunk cache, trainer."""

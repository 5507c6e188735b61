"""Measuring speed and memory, and weighing proposals without a model."""

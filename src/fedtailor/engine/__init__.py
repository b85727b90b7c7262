"""Engines run a round's client work. They know nothing of papers."""

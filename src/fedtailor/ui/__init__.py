"""The live page over run folders, and the data that it and the offline report draw."""

"""What a client takes home: its network as a file that runs without fedtailor, and a page that says what it is."""

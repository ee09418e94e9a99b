"""What the machine gives: folders, files, a terminal."""

"""What a run needs of the machine."""

"""What a run needs of the machine: flags and one-line errors (cli.py), ranks and AdamW (ranks.py),
a run's folder (runs.py), torch.compile and captured graphs (fast.py)."""

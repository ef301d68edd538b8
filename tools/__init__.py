"""Measuring (bench.py), and making the tiny models that training starts from (imitate.py)."""

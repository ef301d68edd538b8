"""Measuring (bench.py), comparing runs over seeds (compare.py), playing with prompted models
(prompted.py), and making the tiny models that training starts from (imitate.py)."""

"""Measuring, comparing, prompted models, and imitation."""

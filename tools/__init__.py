"""Measuring, prompted models, and imitation."""

"""Environments, found by MODULE:CLASS as your own is. In each file the class comes last."""

"""Worlds to act in, which know nothing of learning: WebShop itself (webshop.py), TextWorld with
shortcuts (textworld.py), the house's expert (seeker.py)."""

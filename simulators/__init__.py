"""What envs.py wraps: the house, ALFWorld's engine and WebShop; and the household expert."""

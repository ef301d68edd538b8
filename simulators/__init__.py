"""What envs.py wraps: the simulators of ALFWorld and WebShop, and the household expert."""

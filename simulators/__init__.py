"""The worlds of ALFWorld and WebShop, and how household tasks are solved."""

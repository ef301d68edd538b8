"""The environments that exist: each is found by name, as your own is, and ends with its class."""

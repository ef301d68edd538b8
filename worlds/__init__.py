"""What lies below the six files: WebShop itself, TextWorld with shortcuts, the tiny model, and what
a run needs of its machine."""

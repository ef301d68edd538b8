"""What lies below the six files and is not needed to understand SAPO: WebShop itself, TextWorld
with shortcuts, the tiny model, the choice of w+ and w-, and what a run needs of its machine and of
a GPU."""

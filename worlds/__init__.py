"""What lies below the six files and is not needed to understand SAPO: WebShop itself, TextWorld
with shortcuts, the tiny model, the choice of w+ and w-, curves, a run's folder, and what a run
needs of its machine, a GPU, a hub or an endpoint."""

"""The processes that compute: Ray, actors, trainer ranks, and their scratch folders."""

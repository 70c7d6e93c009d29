"""Work on stored runs: listing, checking, retention, forks, lineage, archives."""

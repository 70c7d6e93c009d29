"""What is done with stored runs: listing, checking, retention, forks, lineage, archives."""

"""Where bytes go: one root on an fsspec filesystem, local files, object stores."""

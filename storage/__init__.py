"""Bottom layer: what a run leaves behind. pyarrow and fsspec only; nothing here knows torch, Prefect or Ray."""

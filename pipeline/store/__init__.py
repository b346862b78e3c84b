"""The dataset's files: shards, metadata, tables. ``pipeline/DESIGN.md`` is the specification. Imports neither Zarr nor Dask."""

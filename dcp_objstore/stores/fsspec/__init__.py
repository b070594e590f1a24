"""The transport `fsspec`: any filesystem of fsspec."""

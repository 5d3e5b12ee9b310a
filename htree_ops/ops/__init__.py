"""Typed Python functions and modules of the library, one file per room."""

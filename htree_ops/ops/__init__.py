"""The functions, modules and caches of each op family, a package for each."""

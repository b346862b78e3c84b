"""Numba kernels: loops over arrays that their callers have checked. One module a topic, all behind one decorator."""

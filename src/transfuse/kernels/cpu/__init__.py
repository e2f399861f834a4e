"""Kernels in C++ for the CPU: built once for a machine, and called through a program of op descriptors."""

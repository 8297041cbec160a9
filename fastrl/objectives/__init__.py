"""Objectives as data, and the single source of their arithmetic for the kernels, torch and C++."""

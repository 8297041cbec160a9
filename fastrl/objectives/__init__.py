"""Objectives as data, and their arithmetic, once: what a row-local kernel, torch and C++ all compute from."""

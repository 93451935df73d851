"""Drift detection of any number of the iteration."""
